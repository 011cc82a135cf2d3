"""Models: sizes as their publications say, FLOPs by the published formulas, shapes that add up."""

from __future__ import annotations

import pytest

from weft.errors import UsageError
from weft.plan.model_presets import MODELS, model
from weft.plan.models import Model, nearest_divisor

# Parameters in billions as published.
PUBLISHED = {
    "gpt-1.7b": 1.65,  # 1.7 in the paper, by its own formula 1.65
    "gpt-7.5b": 7.5,
    "gpt-39b": 39.1,
    "gpt-76b": 76.1,
    "gpt-145b": 145.6,
    "gpt-175b": 174.6,
    "gpt-310b": 310.1,
    "gpt-530b": 529.6,
    "gpt-1t": 1008.0,
    "llama2-7b": 6.74,
    "llama2-13b": 13.02,
    "llama2-70b": 68.98,
    "llama3-8b": 8.03,
    "llama3-70b": 70.55,
    "llama3-405b": 405.9,
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 140.6,
    "deepseek-v3": 671.0,
    "grok1-314b": 314.0,
    "nemotron4-15b": 15.6,
    "nemotron4-340b": 341.0,
}
ACTIVE = {"mixtral-8x7b": 12.9, "mixtral-8x22b": 39.1, "deepseek-v3": 37.0}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_publication(name):
    assert model(name).params / 1e9 == pytest.approx(PUBLISHED[name], rel=0.015)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_those_of_the_publication(name):
    assert model(name).active_params / 1e9 == pytest.approx(ACTIVE[name], rel=0.03)


@pytest.mark.parametrize("name", ["gpt-1.7b", "gpt-175b", "gpt-1t"])
def test_flops_follow_the_formulas_of_the_two_papers(name):
    m, batch, s = model(name), 64, 2048
    layers, h, vocab = m.layers, m.hidden, m.vocab
    plain = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    again = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    assert m.flops(batch * s, s) == pytest.approx(plain, rel=1e-9)
    assert m.flops(batch * s, s, recompute=True) == pytest.approx(again, rel=1e-9)


def test_causal_attention_is_half_of_the_square_and_a_window_is_less():
    m = model("llama3-8b")
    full, causal = m.attention_flops(8192, causal=False), m.attention_flops(8192)
    assert causal == pytest.approx(full / 2, rel=1e-3)
    assert m.but(window=512).attention_flops(8192) < 0.13 * causal
    assert m.but(window=8192).attention_flops(8192) == causal


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [1, 2])
def test_shapes_of_a_layer_hold_its_parameters(name, tp):
    m = model(name)
    held = sum(g.n * g.k * g.count for g in m.attention_gemms(4096, tp))
    if m.mla:  # the down projections are not split
        held += sum(g.n * g.k for g in m.attention_gemms(4096, tp) if "down" in g.name) * (1 / tp - 1)
    assert held * tp == pytest.approx(m.attention_params, rel=1e-6)
    mlp = sum(g.n * g.k * g.count for g in m.mlp_gemms(4096, tp))
    assert mlp * tp == pytest.approx(m.mlp_params, rel=1e-6)


def test_tokens_reach_their_experts_whatever_the_split():
    m, tokens = model("mixtral-8x7b"), 8192
    whole = sum(g.flops for g in m.moe_gemms(tokens))
    assert whole == pytest.approx(2.0 * tokens * 2 * m.expert_params)
    for tp, ep, expert_tp in ((1, 8, 1), (2, 4, 2), (4, 8, 1), (4, 2, 4)):
        assert sum(g.flops for g in m.moe_gemms(tokens, tp, ep, expert_tp)) == pytest.approx(whole / tp)


@pytest.mark.parametrize("said", ["Llama-3.1-70B", "llama3_70b", " LLAMA3-70B "])
def test_names_as_people_write_them(said):
    assert model(said).name == "llama3-70b"


def test_an_unknown_model_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'llama3-70b'"):
        model("llama3-70")


def test_heads_that_do_not_divide_name_the_nearest():
    with pytest.raises(UsageError, match="heads 30 does not divide hidden 4096; nearest is 32"):
        Model(layers=2, hidden=4096, heads=30, ffn=4, vocab=10)
    with pytest.raises(UsageError, match="experts_per_token 9"):
        Model(layers=2, hidden=4096, heads=32, ffn=4, vocab=10, experts=8, experts_per_token=9)
    with pytest.raises(UsageError, match="layers 0 is not valid"):
        Model(layers=0, hidden=4096, heads=32, ffn=4, vocab=10)


@pytest.mark.parametrize(("number", "wanted", "near"), [(64, 7, 8), (80, 6, 5), (105, 8, 7), (96, 1000, 96)])
def test_the_nearest_divisor(number, wanted, near):
    assert nearest_divisor(number, wanted) == near
