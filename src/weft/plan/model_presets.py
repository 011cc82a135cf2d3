"""Models by name, each with the source of its dimensions."""

from __future__ import annotations

from weft.checks import use_one_of
from weft.errors import UsageError
from weft.plan.models import Mla, Model


def _gpt(name: str, layers: int, hidden: int, heads: int) -> Model:
    return Model(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=4 * hidden,
        vocab=51200,
        tied=True,
        positions=2048,
        seq_len=2048,
    )


def _llama(name: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, seq: int) -> Model:
    return Model(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv,
        ffn=ffn,
        vocab=vocab,
        gated=True,
        seq_len=seq,
    )


def _mixtral(name: str, layers: int, hidden: int, heads: int, ffn: int, vocab: int) -> Model:
    return _llama(name, layers, hidden, heads, 8, ffn, vocab, 4096).but(experts=8, experts_per_token=2)


def _qwen3_moe(name: str, layers: int, hidden: int, heads: int, expert_ffn: int) -> Model:
    return Model(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=4,
        head_dim=128,
        ffn=3 * hidden,
        vocab=151936,
        gated=True,
        experts=128,
        experts_per_token=8,
        expert_ffn=expert_ffn,
        seq_len=4096,
    )


def _gpt_oss(name: str, layers: int, experts: int) -> Model:
    return Model(
        name=name,
        layers=layers,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        ffn=2880,
        vocab=201088,
        gated=True,
        experts=experts,
        experts_per_token=4,
        expert_ffn=2880,
        window=128,
        full_layers=layers // 2,
        seq_len=4096,
    )


MODELS: dict[str, Model] = {
    m.name: m
    for m in (
        # Narayanan et al., SC'21, table 1; Korthikanti et al., 2022, table 3
        _gpt("gpt-1.7b", 24, 2304, 24),
        _gpt("gpt-3.6b", 30, 3072, 32),
        _gpt("gpt-7.5b", 36, 4096, 32),
        _gpt("gpt-18b", 40, 6144, 48),
        _gpt("gpt-22b", 48, 6144, 64),
        _gpt("gpt-39b", 48, 8192, 64),
        _gpt("gpt-76b", 60, 10240, 80),
        _gpt("gpt-145b", 80, 12288, 96),
        _gpt("gpt-175b", 96, 12288, 96),
        _gpt("gpt-310b", 96, 16384, 128),
        _gpt("gpt-530b", 105, 20480, 128),
        _gpt("gpt-1t", 128, 25600, 160),
        # Touvron et al., 2023; Llama 3 Herd of Models, table 3
        _llama("llama2-7b", 32, 4096, 32, 32, 11008, 32000, 4096),
        _llama("llama2-13b", 40, 5120, 40, 40, 13824, 32000, 4096),
        _llama("llama2-70b", 80, 8192, 64, 8, 28672, 32000, 4096),
        _llama("llama3-8b", 32, 4096, 32, 8, 14336, 128256, 8192),
        _llama("llama3-70b", 80, 8192, 64, 8, 28672, 128256, 8192),
        _llama("llama3-405b", 126, 16384, 128, 8, 53248, 128256, 8192),
        # Jiang et al., 2024, and the configuration files of the released weights
        _mixtral("mixtral-8x7b", 32, 4096, 32, 14336, 32000),
        _mixtral("mixtral-8x22b", 56, 6144, 48, 16384, 32768),
        # Parmar et al., 2024 (squared ReLU: two matrices)
        _llama("nemotron4-15b", 32, 6144, 48, 8, 24576, 256000, 4096).but(gated=False),
        _llama("nemotron4-340b", 96, 18432, 96, 8, 73728, 256000, 4096).but(gated=False),
        # configuration of the released weights: 8 experts, 2 a token
        _llama("grok1-314b", 64, 6144, 48, 8, 32768, 131072, 8192).but(experts=8, experts_per_token=2),
        # DeepSeek-AI, 2024, section 4.2
        Model(
            name="deepseek-v3",
            layers=61,
            hidden=7168,
            heads=128,
            head_dim=128,
            ffn=18432,
            vocab=129280,
            gated=True,
            experts=256,
            experts_per_token=8,
            expert_ffn=2048,
            shared_ffn=2048,
            dense_layers=3,
            most_nodes=4,
            mla=Mla(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
            seq_len=4096,
        ),
        # config.json of the released weights: Qwen/Qwen3-30B-A3B, Qwen/Qwen3-235B-A22B
        _qwen3_moe("qwen3-30b-a3b", 48, 2048, 32, 768),
        _qwen3_moe("qwen3-235b-a22b", 94, 4096, 64, 1536),
        # config.json of the released weights: openai/gpt-oss-20b, openai/gpt-oss-120b
        _gpt_oss("gpt-oss-20b", 24, 32),
        _gpt_oss("gpt-oss-120b", 36, 128),
        # config.json of the released weights: every other layer is MoE, with one shared expert
        Model(
            name="llama4-maverick",
            layers=48,
            hidden=5120,
            heads=40,
            kv_heads=8,
            head_dim=128,
            ffn=16384,
            vocab=202048,
            gated=True,
            experts=128,
            experts_per_token=1,
            expert_ffn=8192,
            shared_ffn=8192,
            dense_layers=24,
            seq_len=8192,
        ),
    )
}


def model(name: str) -> Model:
    """The preset of that name, in any case. Raises UsageError with the nearest valid name."""
    key = name.strip().lower().replace("_", "-").replace(" ", "-").replace("llama-", "llama")
    key = key.replace("llama3.1", "llama3").replace("gpt3", "gpt")
    if key not in MODELS:
        raise UsageError(
            f"no model named {name!r}; {use_one_of(key, MODELS)}, "
            "or give its dimensions (--layers, --hidden, --heads)"
        )
    return MODELS[key]
