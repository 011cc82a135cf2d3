"""The operations: a collective and the matmul that depends on it, as one call.

Arguments have the same names as in `torch.ops.symm_mem.fused_all_gather_matmul` and related operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias

import torch

from weft.errors import UsageError
from weft.ops.autograd import Fused
from weft.ops.call import Call
from weft.ops.run import refuse, run_call
from weft.policy import Policy

Several: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def all_gather_matmul(
    A_shard: torch.Tensor,  # noqa: N803
    B: Several,  # noqa: N803
    group: Any = None,
    *,
    gather_dim: int = 0,
    return_A: bool = False,  # noqa: N803
    bias: Several | None = None,
    A_scale: torch.Tensor | None = None,  # noqa: N803
    B_scale: Several | None = None,  # noqa: N803
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    rows: Sequence[int] | None = None,
    schedule: str | None = None,
    engine: str | None = None,
    pieces: int | None = None,
    policy: Policy | None = None,
    out: Several | None = None,
) -> Any:
    """Gather A from all ranks along one dimension and multiply by B: `all_gather(A_shard, gather_dim) @ B`.

    A_shard: … by k, contiguous or not. B: k by n, this rank's own (tensor parallelism: its columns), or a
    sequence of such tensors (QKV, gate and up); the result is then a list. gather_dim: any dimension except
    the last; 1 for batch, sequence, features. return_A: return (gathered A, result) instead of the result.
    bias: n numbers, or one such tensor for each B.
    A_scale, B_scale: for fp8, as in `torch._scaled_mm`: one float32 number per tensor (for A, the same on all
    ranks), or (…, 1) for the rows of A_shard and (1, n) for the columns of B. Calls with scales have no
    gradient. out_dtype: dtype of an fp8 result; None: bfloat16.
    rows: size of gather_dim in each rank's shard; needed if the sizes differ.
    schedule, engine, pieces: see `weft explore`; None: chosen by the shape. `policy` can set schedule and
    engine too. out: tensor or tensors for the result; calls with `out` have no gradient.
    """
    call = Call("all_gather_matmul", None, None, schedule, engine, pieces, None, use_fast_accum, return_A)
    tensors = _Tensors(A_shard, B, bias, A_scale, B_scale, out)
    return _apply(call, tensors, group, gather_dim, rows, None, policy, out_dtype)


def matmul_reduce_scatter(
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    group: Any = None,
    *,
    scatter_dim: int = 0,
    bias: torch.Tensor | None = None,
    A_scale: torch.Tensor | None = None,  # noqa: N803
    B_scale: torch.Tensor | None = None,  # noqa: N803
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    rows: Sequence[int] | None = None,
    schedule: str | None = None,
    engine: str | None = None,
    pieces: int | None = None,
    policy: Policy | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply, sum over all ranks and keep this rank's part: `reduce_scatter(A @ B, scatter_dim)`.

    A: … by k, B: k by n, both this rank's own (tensor parallelism: its columns of A, its rows of B). The
    ranks' partial results are added in fp32 and rounded once. scatter_dim: any dimension except the last.
    bias: n numbers, added once, to this rank's part; its gradient covers only this part.
    rows: size of scatter_dim that each rank keeps; None: an even split, the first ranks keeping one more if
    needed. The other arguments are those of `all_gather_matmul`; here, each rank has its own scales.
    """
    call = Call("matmul_reduce_scatter", None, None, schedule, engine, pieces, None, use_fast_accum)
    tensors = _Tensors(A, B, bias, A_scale, B_scale, out)
    made: torch.Tensor = _apply(call, tensors, group, scatter_dim, rows, None, policy, out_dtype)
    return made


def all_to_all_matmul(
    A: torch.Tensor,  # noqa: N803
    B: Several,  # noqa: N803
    group: Any = None,
    *,
    return_A: bool = False,  # noqa: N803
    bias: Several | None = None,
    A_scale: torch.Tensor | None = None,  # noqa: N803
    B_scale: Several | None = None,  # noqa: N803
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    schedule: str | None = None,
    engine: str | None = None,
    pieces: int | None = None,
    policy: Policy | None = None,
    out: Several | None = None,
) -> Any:
    """Send each rank its block of A's rows and multiply the rows received: `all_to_all(A) @ B`, for experts.

    input_splits: rows for each rank; output_splits: rows from each rank, as in `torch.distributed`. If both
    are None, A is split evenly, and all ranks must have the same number of rows. The other arguments are
    those of `all_gather_matmul`.
    """
    if (input_splits is None) != (output_splits is None):
        raise UsageError("all_to_all_matmul: give both input_splits and output_splits, or neither")
    call = Call("all_to_all_matmul", None, None, schedule, engine, pieces, None, use_fast_accum, return_A)
    tensors = _Tensors(A, B, bias, A_scale, B_scale, out)
    return _apply(call, tensors, group, 0, output_splits, input_splits, policy, out_dtype)


class _Tensors:
    """The tensors of a call, each kind as a tuple."""

    __slots__ = ("biases", "many", "outs", "scales", "ws", "x")

    def __init__(self, x: Any, w: Any, bias: Any, a_scale: Any, b_scale: Any, out: Any) -> None:
        self.x, self.many = x, isinstance(w, (list, tuple))
        self.ws = tuple(w) if self.many else (w,)
        self.biases = () if bias is None else _tuple(bias)
        self.scales = () if a_scale is None and b_scale is None else (a_scale, *_tuple(b_scale))
        self.outs = None if out is None else _tuple(out)


def _tuple(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def _apply(
    call: Call,
    given: _Tensors,
    group: Any,
    dim: int,
    rows: Sequence[int] | None,
    sent: Sequence[int] | None,
    policy: Policy | None,
    out_dtype: torch.dtype | None,
) -> Any:
    x, ws, scales = given.x, given.ws, given.scales
    _check_kinds(call, given)
    if policy is not None and (policy.schedule is not None or policy.engine == "dma"):  # else it sets neither
        call = call._replace(schedule=call.schedule or policy.schedule, engine=call.engine or policy.engine)
    if out_dtype is not None:
        call = call._replace(out_dtype=str(out_dtype).removeprefix("torch."))
    if dim:
        dim = _dimension(call, x, dim, group)
        x, call = x.movedim(dim, 0), call._replace(dim=dim)
        scales = (scales[0].movedim(dim, 0), *scales[1:]) if scales and scales[0].dim() > 1 else scales
    if rows is not None or sent is not None:
        inner = prod(x.shape[1:-1])
        call = call._replace(
            rows=None if rows is None else tuple(count * inner for count in rows),
            sent=None if sent is None else tuple(count * inner for count in sent),
        )
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, ws = _cast(x, dtype), tuple(_cast(w, dtype) for w in ws)
    made = _run(call, x, ws, scales, group, None if dim else given.outs)
    return _finish(call, given, made, dim)


def _run(
    call: Call,
    x: torch.Tensor,
    ws: tuple[torch.Tensor, ...],
    scales: tuple[torch.Tensor, ...],
    group: Any,
    outs: Sequence[torch.Tensor] | None,
) -> list[torch.Tensor]:
    """A result for each w, followed by the gathered x if the call returns it."""
    if torch.compiler.is_compiling() or x.device.type == "meta" or _is_fake(x):
        from weft.ops.compiled import compiled

        made = compiled(call, x, ws, group, scales)
        return made if outs is None else [*map(_fill, outs, made), *made[len(outs) :]]
    if torch.is_grad_enabled() and (x.requires_grad or any(w.requires_grad for w in ws)):
        if outs is not None:
            raise UsageError(f"{call.operation}: out= has no gradient; leave it out, or use torch.no_grad()")
        if not scales:
            return list(Fused.apply(call, group, x, *ws))
    ran = run_call(call, (x,), ws, group, outs, scales)
    if not call.return_gathered:
        return ran.outs
    gathered = ran.gathered()
    return [*ran.outs, gathered.view(*ran.outs[0].shape[:-1], gathered.shape[-1])]


def _finish(call: Call, given: _Tensors, made: Sequence[torch.Tensor], dim: int) -> Any:
    """Add biases and restore the caller's order of dimensions."""
    if not dim and not given.many and not given.biases and not call.return_gathered:
        return made[0]
    if dim:
        made = [each.movedim(0, dim) for each in made]
    count = len(given.ws)
    results = list(made[:count])
    if given.biases:
        results = [_add_bias(result, bias) for result, bias in zip(results, given.biases, strict=True)]
    if dim and given.outs is not None:
        results = list(map(_fill, given.outs, results))
    result = results if given.many else results[0]
    return (made[count], result) if call.return_gathered else result


def _add_bias(result: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is None:
        return result
    if result.requires_grad or (bias.requires_grad and torch.is_grad_enabled()):
        return result + bias.to(result.dtype)
    return result.add_(bias.to(result.dtype))


def _fill(out: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    if out.shape != made.shape or out.dtype != made.dtype:
        raise UsageError(
            f"out is {tuple(out.shape)} {out.dtype}; it must be {tuple(made.shape)} {made.dtype}"
        )
    return out.copy_(made)


def _dimension(call: Call, x: torch.Tensor, dim: int, group: Any) -> int:
    """The dimension to gather or scatter, as a non-negative index."""
    found = dim + x.dim() if dim < 0 else dim
    if 0 <= found < x.dim() - 1:
        return found
    name = "scatter_dim" if call.scatters else "gather_dim"
    error = UsageError(
        f"{call.operation}: {name} {dim} is not valid for A of {tuple(x.shape)}; use one of its "
        "dimensions except the last"
    )
    if not torch.compiler.is_compiling():
        refuse(call, group, error)
    raise error


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast as autocast does: integers, fp64 and fp8 stay."""
    wide = tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return tensor.to(dtype) if wide else tensor


def _is_fake(tensor: torch.Tensor) -> bool:
    if type(tensor) in _PLAIN:
        return False
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def _check_kinds(call: Call, given: _Tensors) -> None:
    """Reject arguments that are not plain tensors, before anything is sent."""
    operation = call.operation
    tensors = (given.x, *given.ws, *given.scales)
    for place, tensor in enumerate(tensors):
        if type(tensor) in _PLAIN:
            continue
        name = "A" if not place else "B" if place <= len(given.ws) else "a scale"
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{operation}: {name} must be a tensor, not {type(tensor).__name__}")
        if hasattr(tensor, "to_local"):
            raise UsageError(
                f"{operation}: {name} is a {type(tensor).__name__}; give this rank's part, {name}.to_local()"
            )
    if not given.ws:
        raise UsageError(f"{operation}: B has no tensor; give at least one")
    if len(given.ws) > 1 and call.scatters:
        raise UsageError(f"{operation}: B has {len(given.ws)} tensors; a reduce-scatter takes one")
    if given.biases or given.outs:
        for name, several in (("bias", given.biases), ("out", given.outs or ())):
            if several and len(several) != len(given.ws):
                raise UsageError(f"{operation}: {name} has {len(several)} tensors for {len(given.ws)} of B")
    transformed = not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack()
    if transformed and any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors):
        raise UsageError(
            f"{operation}: torch.func transforms (vmap, grad, jvp) cannot pass through an exchange between "
            "ranks; call it outside of them"
        )
