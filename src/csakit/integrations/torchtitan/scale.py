"""The scale of the indexer's loss beside torchtitan's: one number of tokens for the whole step.

torchtitan divides the summed cross entropy of every micro-batch by the tokens of the step, and its data-parallel ranks add gradients
without dividing them. The sum of the indexer's KL is divided by the same number, in the forward: there is nothing left to set, whatever
the pipeline schedule, the compiler or activation checkpointing does with the backward.
"""

from __future__ import annotations

from csakit import checks


def check_tokens_per_step(tokens_per_step: int | None) -> None:
    """Raises unless a number of tokens was given.

    Raises:
        TypeError, ValueError: it is missing, or not a whole number of at least 1.
    """
    if tokens_per_step is None:
        raise ValueError(
            "tokens_per_step is needed for the indexer's loss: the tokens of one optimizer step, over all micro-batches and ranks. "
            "It is training.global_batch_size * training.seq_len"
        )
    checks.whole("tokens_per_step", tokens_per_step, at_least=1)


def check_share(tokens_per_step: int, tokens: int) -> None:
    """Raises unless a step can consist of micro-batches of this many tokens.

    Raises:
        ValueError: it cannot; the number was not changed along with the batch, most likely.
    """
    if tokens_per_step % tokens:
        raise ValueError(
            f"tokens_per_step must be a multiple of the {tokens} tokens of a micro-batch; got {tokens_per_step}. "
            "It is training.global_batch_size * training.seq_len"
        )
