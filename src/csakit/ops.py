"""The one boundary between verbs and backends: `torch.ops.csakit.*` and their autograd Functions.

Each op has a schema, a fake (shapes for torch.compile), and an implementation that calls the chosen backend with autocast switched
off: scores, statistics and losses keep the precision their inputs ask for. Gradients are ops too; the autograd Functions
outside connect them. Shapes are normal here: keys [B, N, G, D], indices [B, T, S, K].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from . import backends
from .backends.rows import Ranges, accumulator, over_ranks

_RANGES = "Tensor valid, Tensor window_start, Tensor entry_start, Tensor entry_stop, int kv_offset"
_BACKEND = "str backend, int tile"
_ATTEND = f"Tensor q, Tensor? kv, Tensor? entries, Tensor? values, Tensor? entry_values, Tensor? sink, Tensor? indices, {_RANGES}"
_INDEX = "Tensor q_index, Tensor k_index, Tensor? weights"
_DENSE = f"{_INDEX}, Tensor q, Tensor entries, Tensor lse, {_RANGES}"
_DENSE_OPTIONS = f"float index_scale, float scale, bool relu, int sets, str group, {_BACKEND}"

_library = torch.library.Library("csakit", "DEF")


class _Op:
    """An op's two faces, `fake` and `run`, which subclasses have; `call` is the op as a function."""

    call: ClassVar[Callable[..., Any]]


def _define(name: str, arguments: str, returns: str) -> Any:
    """Decorator of an _Op: registers its faces and adds `call`."""

    def register(op: Any) -> Any:
        def run(first: Tensor, *rest: Any) -> Any:
            device = first.device.type
            if not torch.is_autocast_enabled(device):  # entering a context costs as much as a small op
                return op.run(first, *rest)
            with torch.autocast(device, enabled=False):
                return op.run(first, *rest)

        _library.define(f"{name}({arguments}) -> {returns}")
        _library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"csakit::{name}", op.fake, lib=_library)
        dispatched = getattr(torch.ops.csakit, name).default

        def call(*inputs: Any) -> Any:
            if not _unwatched(inputs):
                return dispatched(*inputs)
            recording = torch.is_grad_enabled()
            torch._C._set_grad_enabled(False)  # torch.no_grad() is this and 5 us
            try:
                return run(*inputs)
            finally:
                torch._C._set_grad_enabled(recording)

        op.call = call
        return op

    return register


_PLAIN = frozenset((int, float, bool, str, type(None)))


def _unwatched(inputs: tuple[Any, ...]) -> bool:
    """Whether nobody looks at ops: no compiler, mode, transform, tracer, profiler, and no tensor that is more than CPU numbers.

    Then an op may as well be a plain call, which takes a third off a small one.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
    ):
        return False
    for x in inputs:
        kind = type(x)
        if not (x.is_cpu if kind is Tensor or kind is torch.nn.Parameter else kind in _PLAIN):
            return False
    return True


def _backend(name: str, tile: int) -> tuple[Any, dict[str, int]]:
    return backends.load(name), {"tile": tile} if tile else {}


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    """Ops return tensors: what is not there is an empty one."""
    return like.new_empty(0) if x is None else x


def _contiguous(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x.new_empty(x.shape)


@_define("attend", f"{_ATTEND}, float scale, int value_width, bool teacher, {_BACKEND}", "(Tensor, Tensor, Tensor)")
class _Attend(_Op):
    @staticmethod
    def run(q, kv, entries, values, entry_values, sink, indices, valid, ws, es, ee, off, scale, value_width, teacher, name, tile):
        module, options = _backend(name, tile)
        out, lse, mass = module.attend(
            q, kv, entries, values, entry_values, sink, indices, Ranges(valid, ws, es, ee, off),
            scale=scale, value_width=value_width, teacher=teacher, **options,
        )  # fmt: skip
        return out, lse, _or_empty(mass, lse)

    @staticmethod
    def fake(q, kv, entries, values, entry_values, sink, indices, valid, ws, es, ee, off, scale, value_width, teacher, name, tile):
        lse = q.new_empty(q.shape[:3], dtype=accumulator(q, kv, entries, values, entry_values))
        mass = lse.new_empty(indices.shape) if teacher and indices is not None else lse.new_empty(0)
        return q.new_empty(*q.shape[:3], value_width), lse, mass


@_define(
    "attend_backward",
    f"Tensor d_out, Tensor lse, {_ATTEND}, float scale, int value_width, {_BACKEND}",
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
class _AttendBackward(_Op):
    @staticmethod
    def run(d_out, lse, q, kv, entries, values, entry_values, sink, indices, valid, ws, es, ee, off, scale, value_width, name, tile):
        module, options = _backend(name, tile)
        grads = module.attend_backward(
            d_out, lse, q, kv, entries, values, entry_values, sink, indices, Ranges(valid, ws, es, ee, off),
            scale=scale, value_width=value_width, **options,
        )  # fmt: skip
        return tuple(_or_empty(g, q) for g in grads)

    @staticmethod
    def fake(d_out, lse, q, kv, entries, values, entry_values, sink, indices, valid, ws, es, ee, off, scale, value_width, name, tile):
        return tuple(_contiguous(x, q) for x in (q, kv, entries, values, entry_values, sink))


@_define("log_mass", f"Tensor q, Tensor entries, Tensor lse, Tensor? indices, {_RANGES}, float scale, int sets, {_BACKEND}", "Tensor")
class _LogMass(_Op):
    @staticmethod
    def run(q, entries, lse, indices, valid, ws, es, ee, off, scale, sets, name, tile):
        module, options = _backend(name, tile)
        return module.log_mass(q, entries, lse, indices, Ranges(valid, ws, es, ee, off), scale=scale, sets=sets, **options)

    @staticmethod
    def fake(q, entries, lse, indices, valid, ws, es, ee, off, scale, sets, name, tile):
        shape = (*q.shape[:2], sets, entries.shape[1]) if indices is None else indices.shape
        return q.new_empty(shape, dtype=accumulator(q, entries, lse))


@_define("index_scores", f"{_INDEX}, {_RANGES}, float scale, bool relu, int sets, {_BACKEND}", "Tensor")
class _IndexScores(_Op):
    @staticmethod
    def run(q, k, weights, valid, ws, es, ee, off, scale, relu, sets, name, tile):
        module, options = _backend(name, tile)
        return module.index_scores(q, k, weights, Ranges(valid, ws, es, ee, off), scale=scale, relu=relu, sets=sets, **options)

    @staticmethod
    def fake(q, k, weights, valid, ws, es, ee, off, scale, relu, sets, name, tile):
        return q.new_empty(*q.shape[:2], sets, k.shape[1], dtype=accumulator(q, k, weights))


@_define("select", f"{_INDEX}, {_RANGES}, int topk, float scale, bool relu, int sets, {_BACKEND}", "(Tensor, Tensor)")
class _Select(_Op):
    @staticmethod
    def run(q, k, weights, valid, ws, es, ee, off, topk, scale, relu, sets, name, tile):
        module, options = _backend(name, tile)
        return module.select(q, k, weights, Ranges(valid, ws, es, ee, off), topk=topk, scale=scale, relu=relu, sets=sets, **options)

    @staticmethod
    def fake(q, k, weights, valid, ws, es, ee, off, topk, scale, relu, sets, name, tile):
        scores = q.new_empty(*q.shape[:2], sets, topk, dtype=accumulator(q, k, weights))
        return scores.new_empty(scores.shape, dtype=torch.int32), scores


@_define(
    "scores_backward",
    f"Tensor d_scores, {_INDEX}, Tensor? indices, {_RANGES}, float scale, bool relu, {_BACKEND}",
    "(Tensor, Tensor, Tensor)",
)
class _ScoresBackward(_Op):
    @staticmethod
    def run(d_scores, q, k, weights, indices, valid, ws, es, ee, off, scale, relu, name, tile):
        module, options = _backend(name, tile)
        grads = module.scores_backward(d_scores, q, k, weights, indices, Ranges(valid, ws, es, ee, off), scale=scale, relu=relu, **options)
        return tuple(_or_empty(g, q) for g in grads)

    @staticmethod
    def fake(d_scores, q, k, weights, indices, valid, ws, es, ee, off, scale, relu, name, tile):
        return tuple(_contiguous(x, q) for x in (q, k, weights))


@_define("objective", f"Tensor scores, Tensor log_mass, Tensor valid, Tensor? factor, str group, {_BACKEND}", "(Tensor, Tensor)")
class _Objective(_Op):
    @staticmethod
    def run(scores, log_mass, valid, factor, group, name, tile):
        module, _ = _backend(name, tile)
        kl, gradient = module.objective(scores, over_ranks(log_mass, group), valid, factor)
        return kl, _or_empty(gradient, kl)

    @staticmethod
    def fake(scores, log_mass, valid, factor, group, name, tile):
        kl = scores.new_empty(scores.shape[:2], dtype=accumulator(scores, log_mass, factor))
        return kl, kl.new_empty(0 if factor is None else scores.shape)


@_define("dense_kl", f"{_DENSE}, {_DENSE_OPTIONS}", "Tensor")
class _DenseKl(_Op):
    @staticmethod
    def run(qi, ki, weights, q, entries, lse, valid, ws, es, ee, off, index_scale, scale, relu, sets, group, name, tile):
        module, options = _backend(name, tile)
        return module.dense_kl(
            qi, ki, weights, q, entries, lse, Ranges(valid, ws, es, ee, off),
            index_scale=index_scale, scale=scale, relu=relu, sets=sets, group=group, **options,
        )  # fmt: skip

    @staticmethod
    def fake(qi, ki, weights, q, entries, lse, valid, ws, es, ee, off, index_scale, scale, relu, sets, group, name, tile):
        return q.new_empty(q.shape[:2], dtype=accumulator(qi, ki, weights, q, entries, lse))


@_define("dense_kl_backward", f"Tensor d_kl, {_DENSE}, {_DENSE_OPTIONS}", "(Tensor, Tensor, Tensor)")
class _DenseKlBackward(_Op):
    @staticmethod
    def run(d_kl, qi, ki, weights, q, entries, lse, valid, ws, es, ee, off, index_scale, scale, relu, sets, group, name, tile):
        module, options = _backend(name, tile)
        grads = module.dense_kl_backward(
            d_kl, qi, ki, weights, q, entries, lse, Ranges(valid, ws, es, ee, off),
            index_scale=index_scale, scale=scale, relu=relu, sets=sets, group=group, **options,
        )  # fmt: skip
        return tuple(_or_empty(g, qi) for g in grads)

    @staticmethod
    def fake(d_kl, qi, ki, weights, q, entries, lse, valid, ws, es, ee, off, index_scale, scale, relu, sets, group, name, tile):
        return tuple(_contiguous(x, qi) for x in (qi, ki, weights))


# ---- autograd --------------------------------------------------------------------------------------------------------


def _gradients(grads: tuple[Tensor, ...], inputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if x is None else g for g, x in zip(grads, inputs))


class Attend(torch.autograd.Function):
    """out, lse, log_mass of `torch.ops.csakit.attend`; only out is differentiable."""

    @staticmethod
    def forward(ctx, *args):
        out, lse, mass = _Attend.call(*args)
        q, kv, entries, values, entry_values, sink, indices, valid, ws, es, ee, off, scale, value_width, _, name, tile = args
        ctx.save_for_backward(lse, q, kv, entries, values, entry_values, sink, indices, valid, ws, es, ee)
        ctx.options = (off, scale, value_width, name, tile)
        ctx.mark_non_differentiable(lse, mass)
        return out, lse, mass

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, *_):
        saved = ctx.saved_tensors
        grads = _AttendBackward.call(d_out, *saved, *ctx.options)
        return *_gradients(grads, saved[1:7]), *(None,) * 11


class Score(torch.autograd.Function):
    """Index scores of every entry, differentiable."""

    @staticmethod
    def forward(ctx, q, k, weights, valid, ws, es, ee, off, scale, relu, sets, name, tile):
        ctx.save_for_backward(q, k, weights, valid, ws, es, ee)
        ctx.options = (off, scale, relu, name, tile)
        return _IndexScores.call(q, k, weights, valid, ws, es, ee, off, scale, relu, sets, name, tile)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_scores):
        q, k, weights, *ranges = ctx.saved_tensors
        grads = _ScoresBackward.call(d_scores, q, k, weights, None, *ranges, *ctx.options)
        return *_gradients(grads, (q, k, weights)), *(None,) * 10


class Select(torch.autograd.Function):
    """indices, scores of `torch.ops.csakit.select`; the scores are differentiable."""

    @staticmethod
    def forward(ctx, q, k, weights, valid, ws, es, ee, off, topk, scale, relu, sets, name, tile):
        indices, scores = _Select.call(q, k, weights, valid, ws, es, ee, off, topk, scale, relu, sets, name, tile)
        ctx.save_for_backward(q, k, weights, indices, valid, ws, es, ee)
        ctx.options = (off, scale, relu, name, tile)
        ctx.mark_non_differentiable(indices)
        return indices, scores

    @staticmethod
    @once_differentiable
    def backward(ctx, _, d_scores):
        saved = ctx.saved_tensors
        grads = _ScoresBackward.call(d_scores, *saved, *ctx.options)
        return *_gradients(grads, saved[:3]), *(None,) * 11


class Distill(torch.autograd.Function):
    """(loss, kl) from scores and log_mass [B, T, S, K]; factor [B, T] is weight / divisor. The loss is differentiable for scores."""

    @staticmethod
    def forward(ctx, scores, log_mass, factor, valid, group, name, tile):
        kl, gradient = _Objective.call(scores, log_mass, valid, factor, group, name, tile)
        ctx.save_for_backward(gradient)
        ctx.dtype = scores.dtype
        ctx.mark_non_differentiable(kl)
        return (kl * factor).sum(), kl

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss, _):
        (gradient,) = ctx.saved_tensors
        return (d_loss * gradient).to(ctx.dtype), *(None,) * 6


class DistillDense(torch.autograd.Function):
    """(loss, kl) over every visible entry; the loss is differentiable for q_index, k_index and weights."""

    @staticmethod
    def forward(ctx, qi, ki, weights, factor, q, entries, lse, valid, ws, es, ee, *options):
        kl = _DenseKl.call(qi, ki, weights, q, entries, lse, valid, ws, es, ee, *options)
        ctx.save_for_backward(qi, ki, weights, factor, q, entries, lse, valid, ws, es, ee)
        ctx.options = options
        ctx.mark_non_differentiable(kl)
        return (kl * factor).sum(), kl

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss, _):
        qi, ki, weights, factor, *rest = ctx.saved_tensors
        grads = _DenseKlBackward.call(d_loss * factor, qi, ki, weights, *rest, *ctx.options)
        return *_gradients(grads, (qi, ki, weights)), *(None,) * 16


class AttachLoss(torch.autograd.Function):
    """The first argument unchanged; backward gives the loss the gradient `weight`, whatever comes from above."""

    @staticmethod
    def forward(ctx, out, loss, weight):
        ctx.weight, ctx.dtype, ctx.device = weight, loss.dtype, loss.device
        ctx.shape = loss.shape
        return out.view_as(out)

    @staticmethod
    def backward(ctx, d_out):
        weight = ctx.weight() if callable(ctx.weight) else ctx.weight
        if isinstance(weight, Tensor):
            d_loss = weight.detach().to(device=ctx.device, dtype=ctx.dtype).reshape(ctx.shape)
        else:
            d_loss = torch.full(ctx.shape, weight, dtype=ctx.dtype, device=ctx.device)
        return d_out, d_loss, None


def _differentiable(function: Any, value: Callable[..., Any], inputs: int) -> Callable[..., Any]:
    """An autograd Function as a function. Where none of its first `inputs` arguments needs a gradient, `value` gives the same for less."""

    def call(*args: Any) -> Any:
        wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in args[:inputs])
        # forward-mode AD has no formula: the Function says so, value would drop the tangent
        return function.apply(*args) if wanted or forward_ad._current_level >= 0 else value(*args)

    call.__doc__ = function.__doc__
    return call


def _distill_value(scores: Tensor, log_mass: Tensor, factor: Tensor, valid: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    kl, _ = _Objective.call(scores, log_mass, valid, None, *options)
    return (kl * factor).sum(), kl


def _distill_dense_value(qi: Tensor, ki: Tensor, weights: Tensor | None, factor: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    kl = _DenseKl.call(qi, ki, weights, *rest)
    return (kl * factor).sum(), kl


attend = _differentiable(Attend, _Attend.call, 6)
index_scores = _differentiable(Score, _IndexScores.call, 3)
select = _differentiable(Select, _Select.call, 3)
distill = _differentiable(Distill, _distill_value, 1)
distill_dense = _differentiable(DistillDense, _distill_dense_value, 3)
log_mass = _LogMass.call
