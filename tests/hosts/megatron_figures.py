"""What one small CSA layer of a Megatron-LM checkout does without csakit and with it, on the CPU, in float32.

PYTHONPATH=tests python tests/hosts/megatron_figures.py PATH_OF_CHECKOUT
"""

from __future__ import annotations

import sys
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch


def main(path: str) -> None:
    sys.path.insert(0, path)
    warnings.simplefilter("ignore")
    from megatron.core.transformer.experimental_attention_variant import csa
    from megatron_kernels import replace_kernels
    from megatron_layer import COEFFICIENT, make_data, make_layer, run
    from megatron_ranks import eager
    from test_megatron import REAL, ROOM, loss_scale, packed_params, tracked

    from csakit.integrations import megatron

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    patch = pytest.MonkeyPatch()
    replace_kernels(csa, patch)
    patch.setattr(csa.cp_utils, "_build_cp_indexer_layout", eager(csa.cp_utils._build_cp_indexer_layout))

    def loss(layer, data, packed=None) -> str:
        csa.DSAIndexerLossLoggingHelper.tracker.clear()
        try:
            run(layer.float(), type(data)(*(x.detach().float() for x in data)), packed)
        except Exception as error:
            return type(error).__name__
        return f"{tracked(csa):.6f}" if "values" in csa.DSAIndexerLossLoggingHelper.tracker else "none"

    def context_parallel() -> dict[str, str]:
        """The path that a context-parallel rank takes, in a group of one, with the GPU's kernels replaced."""
        layer, data = make_layer(csa, patch, dsa_indexer_n_heads=8).float(), make_data(sum(REAL), 1)

        def path_loss(key: torch.Tensor) -> str:
            csa.DSAIndexerLossLoggingHelper.tracker.clear()
            query, key, x, qr = (x.detach().float() for x in data._replace(key=key))
            boundary = (x.new_zeros(8, *x.shape[1:]) for x in (x, key))
            layer._forward_thd_cp(query.squeeze(1), key, x, qr, *boundary, packed_params(REAL, REAL))
            return f"{tracked(csa):.6f}"

        found = {"loss, context-parallel path": path_loss(data.key), "  window keys doubled": path_loss(2 * data.key)}
        with torch.no_grad():
            layer.attn_sink[2] += 3
        return found | {"  one head's sink + 3": path_loss(data.key)}

    def figures() -> dict[str, str]:
        found = {}
        for sparse in (True, False):
            layer = make_layer(csa, patch, dsa_indexer_use_sparse_loss=sparse, dsa_indexer_n_heads=8)
            data, name = make_data(22, 2), "sparse" if sparse else "dense"
            found[f"loss, SBHD, {name}"] = loss(layer, data)
            found[f"  window keys doubled, {name}"] = loss(layer, data._replace(key=2 * data.key))
            with torch.no_grad():
                layer.attn_sink[2] += 3
            found[f"  one head's sink + 3, {name}"] = loss(layer, data)
            layer.indexer.index_topk = 5  # everything
            found[f"  and all entries selected, {name}"] = loss(layer, data)
        layer = make_layer(csa, patch, dsa_indexer_n_heads=8)
        found["loss, THD, packed"] = loss(layer, make_data(sum(REAL), 1), packed_params(REAL, REAL))
        found["loss, THD, padded segments"] = loss(layer, make_data(sum(ROOM), 1), packed_params(REAL, ROOM))
        found |= context_parallel()
        found["loss, coefficient None"] = loss(make_layer(csa, patch, dsa_indexer_loss_coeff=None), make_data(22, 2))
        config = SimpleNamespace(
            timers=None, calculate_per_token_loss=False, grad_scale_func=lambda x: 512 * x, experimental_attention_variant="dsv4_hybrid",
            dsa_indexer_loss_coeff=COEFFICIENT, num_moe_experts=None, mtp_num_layers=None,
        )  # fmt: skip
        for ranks, due in ((1, 128), (2, 256)):
            csa.DSAIndexerLossAutoScaler.main_loss_backward_scale = None
            title = f"gradient into the loss, {ranks} context-parallel ranks ({due})"
            found[title] = f"{loss_scale(config, 4, csa, ranks):g}"
        return found

    tables = []
    for make_host in (nullcontext, megatron.install):
        with make_host():
            tables.append(figures())
    print(f"{'':54}{'Megatron-LM':>14}{'with csakit':>14}")
    for name, value in tables[0].items():
        print(f"{name:54}{value:>14}{tables[1][name]:>14}")


if __name__ == "__main__":
    main(sys.argv[1])
