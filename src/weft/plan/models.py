"""Models: parameters, FLOPs and GEMM shapes, per layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.errors import UsageError


@dataclass(frozen=True)
class Gemm:
    """`count` equal matmuls of m by k times k by n. The backward pass has two of the same size."""

    name: str
    m: int
    n: int
    k: int
    count: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class Mla:
    """Attention with low-rank projections, as in DeepSeek-V2 and V3."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class Model:
    """The dimensions of a decoder-only transformer."""

    name: str = "custom"
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    kv_heads: int = 0
    """Key and value heads; 0: one per query head."""
    head_dim: int = 0
    """Width of a head; 0: hidden / heads."""
    gated: bool = False
    """Whether the MLP has three matrices (SwiGLU) instead of two."""
    tied: bool = False
    """Whether the embedding and the output share one matrix."""
    positions: int = 0
    """Rows of a learned position embedding."""
    experts: int = 0
    """Experts in each MoE layer; 0: a dense model."""
    experts_per_token: int = 0
    expert_ffn: int = 0
    """Width of one expert; 0: `ffn`."""
    shared_ffn: int = 0
    """Width of the shared expert, which every token visits; 0: none."""
    most_nodes: int = 0
    """Most nodes that the router sends a token to; 0: no limit."""
    dense_layers: int = 0
    """Layers of an MoE model that have a plain MLP."""
    window: int = 0
    """Tokens that attention looks back at; 0: all of them."""
    full_layers: int = 0
    """Layers that attend to all tokens in a model with a window."""
    parallel_block: bool = False
    """Whether attention and MLP read the same input, which halves the tensor-parallel collectives."""
    mla: Mla | None = None
    seq_len: int = 2048
    """Default length of a sequence, in tokens."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "ffn", "vocab", "seq_len"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"model {name} {value!r} is not valid; use an integer above 0")
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if not self.head_dim:
            if self.hidden % self.heads:
                near = nearest_divisor(self.hidden, self.heads)
                raise UsageError(
                    f"model heads {self.heads} does not divide hidden {self.hidden}; nearest is {near}"
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if self.heads % self.kv_heads:
            near = nearest_divisor(self.heads, self.kv_heads)
            raise UsageError(
                f"model kv_heads {self.kv_heads} does not divide its {self.heads} heads; nearest is {near}"
            )
        if not self.experts and (self.experts_per_token or self.expert_ffn or self.shared_ffn):
            raise UsageError(
                "model experts_per_token, expert_ffn or shared_ffn without experts; set experts too"
            )
        if not 0 <= self.dense_layers <= self.layers:
            raise UsageError(f"model dense_layers {self.dense_layers} is not valid with {self.layers} layers")
        if self.experts:
            if not 1 <= self.experts_per_token <= self.experts:
                raise UsageError(
                    f"model experts_per_token {self.experts_per_token} is not valid with "
                    f"{self.experts} experts; use 1 to {self.experts}"
                )
            if not self.expert_ffn:
                object.__setattr__(self, "expert_ffn", self.ffn)

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def query_dim(self) -> int:
        """Width of a head's query and key, in elements."""
        return self.mla.nope_dim + self.mla.rope_dim if self.mla else self.head_dim

    @property
    def value_dim(self) -> int:
        return self.mla.value_dim if self.mla else self.head_dim

    @property
    def mlp_matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's attention."""
        h, a = self.hidden, self.heads
        if self.mla:
            m = self.mla
            q = h * m.q_rank + m.q_rank * a * self.query_dim
            kv = h * (m.kv_rank + m.rope_dim) + m.kv_rank * a * (m.nope_dim + m.value_dim)
            return q + kv + a * m.value_dim * h
        return h * self.head_dim * (2 * a + 2 * self.kv_heads)

    @property
    def mlp_params(self) -> int:
        """Parameters of one plain MLP."""
        return self.mlp_matrices * self.hidden * self.ffn

    @property
    def expert_params(self) -> int:
        """Parameters of one expert."""
        return self.mlp_matrices * self.hidden * self.expert_ffn

    @property
    def shared_params(self) -> int:
        """Parameters of an MoE layer's router and shared expert."""
        return self.hidden * self.experts + self.mlp_matrices * self.hidden * self.shared_ffn

    @property
    def embedding_params(self) -> int:
        """Parameters of embedding and output."""
        return (self.vocab * (1 if self.tied else 2) + self.positions) * self.hidden

    @property
    def params(self) -> int:
        """All parameters (norms and biases left out: below 0.1%)."""
        moe = self.moe_layers * (self.experts * self.expert_params + self.shared_params)
        dense = (self.layers - self.moe_layers) * self.mlp_params
        return self.layers * self.attention_params + dense + moe + self.embedding_params

    @property
    def active_params(self) -> int:
        """Parameters that one token uses, without the embedding lookup."""
        moe = self.moe_layers * (self.experts_per_token * self.expert_params + self.shared_params)
        dense = (self.layers - self.moe_layers) * self.mlp_params
        return self.layers * self.attention_params + dense + moe + self.vocab * self.hidden

    def attention_flops(self, seq_len: int, *, causal: bool = True) -> float:
        """Forward FLOPs of one layer's score and value matmuls per token, averaged over the layers.

        `causal`: count only the part below the diagonal, as flash attention computes it; otherwise the full
        square, as publications count it.
        """
        span = (seq_len + 1) / 2 if causal else float(seq_len)
        if self.window and self.window < seq_len:
            near = self.window - self.window * (self.window - 1) / (2 * seq_len) if causal else self.window
            span = near + (span - near) * self.full_layers / self.layers
        return 2.0 * self.heads * (self.query_dim + self.value_dim) * span

    def flops(self, tokens: float, seq_len: int, *, recompute: bool = False, causal: bool = False) -> float:
        """FLOPs of one step over `tokens`: those of the forward pass, and twice as many backward.

        Without `recompute`, these are the model FLOPs of Korthikanti et al., 72·B·l·s·h²(1 + s/6h + V/12lh).
        With it they are those of Narayanan et al., 96·B·l·s·h²(1 + s/6h + V/16lh): layers count four times,
        the output three times.
        """
        times = 4 if recompute else 3
        output = 2.0 * self.vocab * self.hidden
        layers = 2.0 * self.active_params - output
        layers += self.layers * self.attention_flops(seq_len, causal=causal)
        return tokens * (times * layers + 3 * output)

    def attention_gemms(self, tokens: int, tp: int = 1) -> list[Gemm]:
        """Forward projections of one layer's attention on one of `tp` ranks."""
        h, a = self.hidden, self.heads
        if self.mla:
            m = self.mla
            return [
                Gemm("q_down", tokens, m.q_rank, h),
                Gemm("q_up", tokens, a * self.query_dim // tp, m.q_rank),
                Gemm("kv_down", tokens, m.kv_rank + m.rope_dim, h),
                Gemm("kv_up", tokens, a * (m.nope_dim + m.value_dim) // tp, m.kv_rank),
                Gemm("proj", tokens, h, a * m.value_dim // tp),
            ]
        qkv = (a + 2 * max(self.kv_heads, tp)) * self.head_dim // tp
        return [Gemm("qkv", tokens, qkv, h), Gemm("proj", tokens, h, a * self.head_dim // tp)]

    def mlp_gemms(self, tokens: int, tp: int = 1) -> list[Gemm]:
        """Forward matmuls of a plain MLP on one of `tp` ranks."""
        return _mlp("", tokens, self.hidden, max(1, self.ffn // tp), self.gated)

    def moe_gemms(self, tokens: int, tp: int = 1, ep: int = 1, expert_tp: int = 1) -> list[Gemm]:
        """Forward matmuls of an MoE layer on one rank; tokens are spread evenly over all experts."""
        local = max(1, self.experts // ep)
        rows = max(1, round(tokens * expert_tp / tp * self.experts_per_token / local))
        found = _mlp("expert_", rows, self.hidden, max(1, self.expert_ffn // expert_tp), self.gated, local)
        if self.shared_ffn:
            found += _mlp("shared_", tokens, self.hidden, max(1, self.shared_ffn // tp), self.gated)
        return found

    def output_gemm(self, tokens: int, tp: int = 1) -> Gemm:
        """Forward matmul of the output layer on one of `tp` ranks."""
        return Gemm("output", tokens, max(1, self.vocab // tp), self.hidden)

    def but(self, **changes: object) -> Model:
        """This model with other values."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _mlp(prefix: str, tokens: int, hidden: int, width: int, gated: bool, count: int = 1) -> list[Gemm]:
    up = 2 * width if gated else width
    return [
        Gemm(f"{prefix}up", tokens, up, hidden, count),
        Gemm(f"{prefix}down", tokens, hidden, width, count),
    ]


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` that is nearest to `wanted` in ratio."""
    found = {d for i in range(1, int(number**0.5) + 1) if number % i == 0 for d in (i, number // i)}
    return min(sorted(found), key=lambda d: max(d / wanted, wanted / d) if wanted > 0 else d)
