"""csakit inside Megatron-LM: the CSA layers' selection, attention, teacher and indexer loss come from csakit.

    from csakit.integrations import megatron
    handle = megatron.install()          # after megatron.core can be imported, before the first step
    print(handle)                        # each place that was changed
    handle.remove()

What is changed is found by the parameters of the functions, not by a version; a checkout with others is refused as a whole.
"""

from .handle import Handle, Site, import_megatron, install

__all__ = ["Handle", "Site", "import_megatron", "install"]
