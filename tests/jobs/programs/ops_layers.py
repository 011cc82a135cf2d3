"""Checks of weft.ops layers, styles and parallelize on P ranks over gloo: `ops_layers.py P FOLDER CHECK…`."""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked_ranks import run_ranks
from ops_graphs import check_graphs, check_pending  # noqa: F401
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from transformer import Attention, FeedForward, Settings, Transformer

from weft.errors import UsageError
from weft.ops import (
    ColumnParallelLinear,
    RowParallelLinear,
    SequenceColumnwise,
    SequenceRowwise,
    functions,
    parallelize,
)

SETTINGS = Settings(vocabulary=48, width=24, inner=40, heads=4, key_heads=4, blocks=2)


class Mlp(nn.Module):
    def __init__(self, width=6, inner=10):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


def mlp(seed=5, **sizes):
    torch.manual_seed(seed)
    return Mlp(**sizes)


def fused(model, mesh, **options):
    return parallelize_module(
        model, mesh, {"up": SequenceColumnwise(**options), "down": SequenceRowwise(**options)}
    )


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def same(got, want, what, tolerance=1e-5):
    got, want = whole(got), whole(want)
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, not {tuple(want.shape)}"
    error = ((got - want).abs().max() / want.abs().max().clamp(min=1e-3)).item()
    assert error <= tolerance, f"{what}: off by {error:.2g}"


def same_parameters(got, want, what, tolerance=1e-5):
    theirs = dict(want.named_parameters())
    for name, parameter in got.named_parameters():
        same(parameter, theirs[name], f"{what}: {name}", tolerance)


def same_gradients(got, want, what):
    theirs = dict(want.named_parameters())
    for name, parameter in got.named_parameters():
        same(parameter.grad, theirs[name].grad, f"{what}: gradient of {name}", 1e-4)


def check_values(rank, ranks):
    """Results and gradients of the layers, by style and by hand, equal those of the plain model."""
    mesh = init_device_mesh("cpu", (ranks,))
    plain = mlp(inner=7 + 2 * ranks)
    for shape, dim in (((2 * ranks, 6), 0), ((3, 2 * ranks, 6), 1), ((2 * ranks, 3, 6), 0)):
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
        mine = x.chunk(ranks, dim)[rank]
        plain.zero_grad()
        want = plain(x)
        want.square().sum().backward()
        by_hand = copy.deepcopy(plain)
        by_hand.up = ColumnParallelLinear.from_linear(plain.up, sequence_dim=dim)
        by_hand.down = RowParallelLinear.from_linear(
            plain.down, sequence_dim=dim, schedule="uniform-fused-2d"
        )
        by_style = fused(copy.deepcopy(plain), mesh, sequence_dim=dim, schedule="shard")
        for model in (by_hand, by_style, copy.deepcopy(by_style)):
            model.zero_grad()
            got = model(mine)
            same(got, want.chunk(ranks, dim)[rank], f"{shape}")
            got.square().sum().backward()
            same_gradients(model, plain, f"{shape}")
        by_style.zero_grad()
        given = DTensor.from_local(mine, mesh, [Shard(dim)], run_check=False).requires_grad_()
        got = by_style(given)
        got.square().sum().backward()
        same_gradients(by_style, plain, f"{shape} by DTensor")
    with torch.autocast("cpu", torch.bfloat16):
        got, want = by_style(mine), plain(x)
    assert got.dtype == want.dtype == torch.bfloat16
    same(got.float(), want.float().chunk(ranks, dim)[rank], "autocast", 5e-2)
    made = ColumnParallelLinear(6, 5 * ranks, bias=False)
    assert made.weight.shape == (5 * ranks, 6)
    assert made.weight.to_local().shape == (5, 6)
    try:
        ColumnParallelLinear(6, ranks + 1 if ranks > 2 else ranks - 1)
    except UsageError as error:
        assert "without any" in str(error)
    else:
        raise AssertionError("a rank without features was not refused")


def check_uneven_tokens(rank, ranks):
    """Token counts that the ranks do not divide, split as DTensors do; fewer tokens than ranks."""
    mesh = init_device_mesh("cpu", (ranks,))
    plain = mlp(inner=4 * ranks)
    for tokens in (2 * ranks + 1, ranks + 1, 1):
        x = torch.randn(2, tokens, 6, generator=torch.Generator().manual_seed(tokens))
        plain.zero_grad()
        want = plain(x)
        want.square().sum().backward()
        model = parallelize_module(
            mlp(inner=4 * ranks),
            mesh,
            {"up": SequenceColumnwise(), "down": SequenceRowwise(use_local_output=False)},
        )
        parts = [*x.chunk(ranks, 1), *[x[:, :0]] * ranks]
        given = DTensor.from_local(
            parts[rank], mesh, [Shard(1)], run_check=False, shape=x.shape, stride=x.stride()
        )
        got = model(given)
        assert isinstance(got, DTensor)
        assert tuple(got.placements) == (Shard(1),)
        same(got, want, f"{tokens} tokens")
        got.to_local().square().sum().backward()
        same_gradients(model, plain, f"{tokens} tokens")


def check_like_torch(rank, ranks):
    """Placements, state_dicts and gradient norms are those of torch's styles."""
    mesh = init_device_mesh("cpu", (ranks,))
    theirs = parallelize_module(
        mlp(inner=4 * ranks),
        mesh,
        {"up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel(output_layouts=Shard(0))},
    )
    ours = fused(mlp(seed=9, inner=4 * ranks), mesh)
    for name, parameter in ours.named_parameters():
        like = dict(theirs.named_parameters())[name]
        assert type(parameter) is type(like)
        assert parameter.placements == like.placements, f"{name}: {parameter.placements}"
        assert parameter.shape == like.shape
        assert parameter.device_mesh == like.device_mesh
    assert (ours.up.in_features, ours.up.out_features) == (theirs.up.in_features, theirs.up.out_features)
    ours.load_state_dict(theirs.state_dict())
    same_parameters(ours, theirs, "from torch's", 0.0)
    theirs.load_state_dict(fused(mlp(seed=11, inner=4 * ranks), mesh).state_dict())
    same_parameters(theirs, mlp(seed=11, inner=4 * ranks), "to torch's", 0.0)
    plain = mlp(seed=11, inner=4 * ranks)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2 * ranks, 6, generator=torch.Generator().manual_seed(1))
    plain(x).square().sum().backward()
    for model in (ours, theirs):
        model(x.chunk(ranks)[rank]).square().sum().backward()
    same_gradients(ours, plain, "gradients")
    for norm in (1.0, 2.0, float("inf")):
        want = nn.utils.clip_grad_norm_(plain.parameters(), 1e9, norm)
        for foreach in (False, True):
            got = nn.utils.clip_grad_norm_(ours.parameters(), 1e9, norm, foreach=foreach)
            same(got, want, f"gradient norm {norm}")
    nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    nn.utils.clip_grad_norm_(ours.parameters(), 0.5)
    same_gradients(ours, plain, "clipped")


def check_optimizers(rank, ranks):
    """Plain, foreach and fused optimizers update the weights as they do those of a plain model."""
    mesh = init_device_mesh("cpu", (ranks,))
    x = torch.randn(2 * ranks, 6, generator=torch.Generator().manual_seed(1))
    kinds = [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
        lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    ]
    for number, kind in enumerate(kinds):
        plain, ours = mlp(inner=4 * ranks), fused(mlp(inner=4 * ranks), mesh)
        theirs = kind(plain.parameters()), kind(ours.parameters())
        for _ in range(3):
            for model, given, optimizer in (
                (plain, x, theirs[0]),
                (ours, x.chunk(ranks)[rank], theirs[1]),
            ):
                optimizer.zero_grad()
                model(given).square().sum().backward()
                optimizer.step()
        same_parameters(ours, plain, f"optimizer {number}", 1e-4)


def check_meta(rank, ranks):
    """A model created on the meta device, divided, then filled, as in torchtitan."""
    mesh = init_device_mesh("cpu", (ranks,))
    with torch.device("meta"):
        model = Mlp(inner=4 * ranks)
    fused(model, mesh)
    model.to_empty(device="cpu")
    plain = mlp(inner=4 * ranks)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                DTensor.from_local(
                    _chunk(
                        dict(plain.named_parameters())[name].detach(), parameter.placements[0], rank, ranks
                    ),
                    mesh,
                    parameter.placements,
                    run_check=False,
                )
            )
    x = torch.randn(2 * ranks, 6, generator=torch.Generator().manual_seed(1))
    same(model(x.chunk(ranks)[rank]), plain(x).chunk(ranks)[rank], "filled")


def _chunk(tensor, placement, rank, ranks):
    return (
        tensor if isinstance(placement, Replicate) else tensor.chunk(ranks, placement.dim)[rank].contiguous()
    )


def check_compiled(rank, ranks):
    """torch.compile with no graph break, also for layers that share a gather."""
    mesh = init_device_mesh("cpu", (ranks,))
    plain = mlp(inner=4 * ranks)
    model = fused(mlp(inner=4 * ranks), mesh)
    x = torch.randn(3, 2 * ranks, 6, generator=torch.Generator().manual_seed(1))
    plain(x).square().sum().backward()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(x.chunk(ranks, 1)[rank]).square().sum().backward()
    same_gradients(model, plain, "compiled")
    tokens = torch.randint(0, 48, (2, 4 * ranks), generator=torch.Generator().manual_seed(2))
    plain, model = transformer(), parallelize(transformer(), mesh)
    plain(tokens).square().mean().backward()
    torch.compile(model, backend="aot_eager")(tokens).square().mean().backward()
    same_gradients(model, plain, "compiled transformer")


def transformer(seed=3, settings=SETTINGS):
    torch.manual_seed(seed)
    return Transformer(settings)


def check_model(rank, ranks):
    """`parallelize` on a Llama-like model with torchtitan's names: equal to plain, gathers counted, tied weights."""
    mesh = init_device_mesh("cpu", (ranks,))
    calls = []
    original = functions.run_call

    def counted(call, *given, **more):
        calls.append(call.operation)
        return original(call, *given, **more)

    for tied in (False, True):
        settings = SETTINGS._replace(tied=tied)
        plain, model = transformer(settings=settings), parallelize(transformer(settings=settings), mesh)
        if tied:
            assert model.output.weight is model.tok_embeddings.weight
        for length in (4 * ranks, 4 * ranks + 1):
            tokens = torch.randint(0, 48, (2, length), generator=torch.Generator().manual_seed(length))
            plain.zero_grad()
            model.zero_grad()
            want, got = plain(tokens), model(tokens)
            same(got, want, "logits")
            want.square().mean().backward()
            got.square().mean().backward()
            same_gradients(model, plain, "transformer")
        functions.run_call = counted
        with torch.no_grad():
            model(tokens)
        functions.run_call = original
        blocks = SETTINGS.blocks
        assert calls.count("all_gather_matmul") == 2 * blocks + 1, calls
        assert calls.count("matmul_reduce_scatter") == 2 * blocks, calls
        calls.clear()
    sharded = parallelize(transformer(), mesh, gather_logits=False)(tokens)
    assert tuple(sharded.placements) == (Shard(2),)
    same(sharded.flatten(0, 1), transformer()(tokens).flatten(0, 1), "sharded logits")
    same(copy.deepcopy(parallelize(transformer(), mesh))(tokens), transformer()(tokens), "a copy")
    check_interrupted(mesh, tokens)
    check_given_embeddings(mesh)


def check_interrupted(mesh, tokens):
    """A forward pass that fails between query and key leaves a model that can be copied and used."""
    plain, model = transformer(), parallelize(transformer(), mesh)

    def interrupt(*_):
        raise KeyError("interrupted")

    hook = model.layers[0].attention.wk.register_forward_pre_hook(interrupt)
    try:
        model(tokens)
    except KeyError:
        hook.remove()
    same(copy.deepcopy(model)(tokens), plain(tokens), "a copy after an error")


def check_given_embeddings(mesh):
    """Blocks get embeddings that are whole on every rank; an unused layer has no gradient."""
    plain, model = transformer(), parallelize(transformer(), mesh)
    x = torch.randn(2, 9, SETTINGS.width, generator=torch.Generator().manual_seed(3))
    given = [x.clone().requires_grad_() for _ in range(2)]
    for net, embedded in zip((plain, model), given, strict=True):
        net.layers[0].feed_forward.forward = lambda x, of=net.layers[0].feed_forward: of.w2(of.w1(x))
        net.output(net.norm(net.layers[0](embedded))).square().mean().backward()
    same(given[1].grad, given[0].grad, "gradient of embeddings")
    used = plain.layers[0].feed_forward.w1, model.layers[0].feed_forward.w1
    same(used[1].weight.grad, used[0].weight.grad, "gradient of the layer that is used")
    unused = model.layers[0].feed_forward.w3.weight.grad
    assert unused is None or not whole(unused).any()  # torch 2.11's DTensors fill in zeros


def check_refused(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    odd = SETTINGS._replace(heads=ranks + 1, key_heads=ranks + 1, width=8 * (ranks + 1))
    few = SETTINGS._replace(heads=2 * ranks, key_heads=1, width=16 * ranks)
    for model, words in (
        (Mlp(), "knows no layer of this model"),
        (transformer(settings=odd), f"{ranks + 1} heads, which {ranks} ranks cannot divide"),
        (transformer(settings=few), "wk has 1 head, which"),
        (with_layer(Quantized(32, 48)), "w3: Quantized has a forward pass of its own"),
        (with_layer(nn.utils.parametrizations.weight_norm(nn.Linear(32, 48))), "w3: ParametrizedLinear has"),
        (with_layer(nn.Linear(32, ranks - 1)), f"leave some of {ranks} ranks without any"),
        (with_position(), "does not know the parameters of the model"),
        (
            with_module("feed_forward", SoftmaxGate),
            "feed_forward (SoftmaxGate) cannot be divided: its forward",
        ),
        (with_module("feed_forward", GateAndUp), "GateAndUp) cannot be divided: its forward pass mixes"),
        (
            with_module("attention", CountsHeads),
            "CountsHeads) cannot be divided: its forward pass uses heads",
        ),
        (with_adapter(), "wq.base_layer, which has adapters"),
        (parallelize(transformer(), mesh), "divided already"),
    ):
        before = {name: (id(each), type(each)) for name, each in model.named_parameters()}
        try:
            parallelize(model, mesh)
        except UsageError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"not refused: {words}")
        after = {name: (id(each), type(each)) for name, each in model.named_parameters()}
        assert after == before, f"changed: {words}"


class SoftmaxGate(FeedForward):
    def forward(self, x):
        return self.w2(self.w1(x).softmax(-1) * self.w3(x))


class GateAndUp(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(s.width, 2 * s.inner), nn.Linear(s.inner, s.width)

    def forward(self, x):
        gate, up = self.up_proj(x).chunk(2, -1)
        return self.down_proj(nn.functional.silu(gate) * up)


class CountsHeads(Attention):
    heads = 4

    def forward(self, x):
        q, k, v = (split(w(x), self) for w in (self.wq, self.wk, self.wv))
        made = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(made.transpose(1, 2).flatten(2))


def split(x, attention):
    return x.unflatten(-1, (attention.heads, -1)).transpose(1, 2)


def with_module(name, kind):
    model = transformer()
    setattr(model.layers[-1], name, kind(SETTINGS))
    return model


def with_adapter():
    """A model whose layers are wrapped as by peft."""
    model = transformer()
    for layer in model.layers:
        wrapper = nn.Module()
        wrapper.base_layer, layer.attention.wq = layer.attention.wq, wrapper
    return model


class Quantized(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x.round(), self.weight, self.bias)


def with_layer(layer):
    """A model with one layer that cannot be divided, in its last block."""
    model = transformer()
    model.layers[-1].feed_forward.w3 = layer
    return model


def with_position():
    model = transformer()
    model.position = nn.Parameter(torch.zeros(3))
    return model


def check_checkpointed(rank, ranks):
    """Activation checkpointing: the operations run again in the backward pass."""
    mesh = init_device_mesh("cpu", (ranks,))
    x = torch.randn(2 * ranks, 6, generator=torch.Generator().manual_seed(1))
    plain, model = mlp(inner=4 * ranks), fused(mlp(inner=4 * ranks), mesh)
    plain(x).square().sum().backward()
    for reentrant in (False, True):
        model.zero_grad()
        given = x.chunk(ranks)[rank].clone().requires_grad_()
        checkpoint(model, given, use_reentrant=reentrant).square().sum().backward()
        same_gradients(model, plain, f"checkpointed {reentrant}")
    plain, model = transformer(), parallelize(transformer(), mesh)
    tokens = torch.randint(0, 48, (2, 4 * ranks), generator=torch.Generator().manual_seed(2))
    plain(tokens).square().mean().backward()
    model.checkpointing = True
    model(tokens).square().mean().backward()
    same_gradients(model, plain, "checkpointed transformer")


def check_fsdp(rank, ranks):
    """FSDP2 over one dimension of a mesh, fused tensor parallelism over the other: losses and weights of a plain model."""
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    plain, model = transformer(), parallelize(transformer(), mesh["tp"])
    for block in model.layers:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    theirs = torch.optim.AdamW(plain.parameters(), 1e-2), torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(4):
        tokens = torch.randint(0, 48, (ranks, 8), generator=torch.Generator().manual_seed(step))
        mine = tokens.chunk(ranks // 2)[mesh["dp"].get_local_rank()]
        for net, given, optimizer in ((plain, tokens, theirs[0]), (model, mine, theirs[1])):
            optimizer.zero_grad()
            net(given).square().mean().backward()
        norms = [nn.utils.clip_grad_norm_(net.parameters(), 1.0) for net in (plain, model)]
        same(norms[1], norms[0], "gradient norm", 1e-4)
        for optimizer in theirs:
            optimizer.step()
    same_parameters(model, plain, "after FSDP2 and fused tensor parallelism", 1e-3)


def check_save(rank, ranks):
    """Half of a training run, saved with its optimizer; `check_load` continues it on any number of ranks."""
    train(rank, ranks, first=True)


def check_load(rank, ranks):
    train(rank, ranks, first=False)


def train(rank, ranks, first):
    mesh = init_device_mesh("cpu", (ranks,))
    folder = f"{sys.argv[2]}/../checkpoint"
    plain = transformer()
    model = parallelize(transformer(seed=3 if first else 4), mesh)
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-2) for each in (plain, model)]

    def step(net, optimizer, number):
        tokens = torch.randint(0, 48, (2, 12), generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        loss = net(tokens).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    for number in range(3):
        step(plain, optimizers[0], number)
    if first:
        for number in range(3):
            step(model, optimizers[1], number)
        weights, state = get_state_dict(model, optimizers[1])
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
        losses = [step(model, optimizers[1], number) for number in range(3, 6)]
        if rank == 0:
            torch.save(losses, f"{folder}.{ranks}")
    else:
        weights, state = get_state_dict(model, optimizers[1])
        found = {"model": weights, "optimizer": state}
        dcp.load(found, checkpoint_id=folder)
        set_state_dict(
            model, optimizers[1], model_state_dict=found["model"], optim_state_dict=found["optimizer"]
        )
        same_parameters(model, plain, "restored", 1e-3)
        losses = [step(model, optimizers[1], number) for number in range(3, 6)]
        try:
            before = torch.load(f"{folder}.{ranks}")
        except FileNotFoundError:
            before = None
        if before is not None:
            assert losses == before, f"not bit-identical after a resume: {losses} and {before}"
    wanted = [step(plain, optimizers[0], number) for number in range(3, 6)]
    for got, want in zip(losses, wanted, strict=True):
        assert abs(got - want) <= 1e-4 * abs(want), f"losses {losses}, plain {wanted}"


def main():
    ranks, folder, checks = int(sys.argv[1]), sys.argv[2], sys.argv[3:]

    def rank_main(rank, ranks):
        for name in checks:
            globals()[f"check_{name}"](rank, ranks)
            dist.barrier()

    sys.exit(1 if run_ranks(ranks, folder, 60.0, rank_main) else 0)


if __name__ == "__main__":
    main()
