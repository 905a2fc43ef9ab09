from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvlab.models.bagel.attending import MaskedAttention
from kvlab.models.bagel.network import BagelNet, gen_mask
from kvlab.models.layers import RMSNorm
from kvlab.train.bagel import forward, network, packing, quick
from kvlab.train.bagel.packing import Part

BOS, EOS, START, END = 1, 2, 3, 4
LONG, SHORT = (20, 21, 22, 23), (30,)


def pack(*groups: list[list[Part]]) -> packing.Packed:
    return packing.pack(groups, num_latents=network.NUM_LATENTS, num_patches=network.NUM_PATCHES)


@pytest.fixture(scope="module")
def net() -> BagelNet:
    torch.manual_seed(0)
    net = network.build().requires_grad_(False)
    torch.nn.init.normal_(net.llm2vae.weight, std=0.1)
    return net


# -- layout ------------------------------------------------------------------------------------------------------------


def test_a_text_is_opened_closed_and_causal() -> None:
    packed = pack([[packing.text(LONG)]])
    assert packed.ids.tolist() == [BOS, *LONG, EOS]
    assert packed.positions.tolist() == list(range(6))
    assert torch.equal(packed.masks[0][0], torch.ones(6, 6, dtype=torch.bool).tril())


def test_an_edit_reads_latents_then_patches_then_text_each_picture_at_one_position() -> None:
    packed = pack([[*packing.pictured(7), packing.text(SHORT), Part("made", picture=8)]])
    assert packed.positions.tolist() == [0] * 18 + [1] * 27 + [2, 3, 4] + [5] * 18
    assert packed.ids[[0, 17, 18, 44, 48, 65]].tolist() == [START, END] * 3
    assert packed.slots["vae"].tolist() == list(range(1, 17))
    assert packed.slots["vit"].tolist() == list(range(19, 44))
    assert packed.slots["made"].tolist() == list(range(49, 65))
    assert [packed.pictures[kind].tolist() for kind in ("vae", "vit", "made")] == [[7], [7], [8]]


def test_a_picture_sees_all_of_itself_and_what_came_before_and_no_more() -> None:
    mask = pack([[packing.text(SHORT), Part("vit", picture=0), packing.text(SHORT)]]).masks[0][0]
    assert mask[3:30, :30].all()
    assert not mask[3:30, 30:].any()
    assert not mask[:3, 3:].any()


def test_only_answers_are_learned_each_id_from_the_one_before() -> None:
    packed = pack([[packing.text(LONG), packing.text(SHORT, is_answer=True)]])
    assert packed.labels.tolist() == [packing.IGNORED] * 6 + [SHORT[0], EOS, packing.IGNORED]


def test_only_latents_go_through_the_other_expert() -> None:
    is_gen = pack([[Part("vae", picture=0), packing.text(SHORT)]]).is_gen
    assert is_gen is not None
    assert is_gen.tolist() == [*gen_mask(16).tolist(), False, False, False]
    assert pack([[packing.text(SHORT)]]).is_gen is None


def test_ends_are_the_last_tokens_of_requests_in_flat_order() -> None:
    packed = pack([[packing.text(LONG)], [packing.text(SHORT)]], [[packing.text(SHORT)]])
    assert packed.ends.tolist() == [5, 8, 14]
    assert packed.ids[packed.ends].tolist() == [EOS] * 3


# -- forward -----------------------------------------------------------------------------------------------------------


def hidden(net: BagelNet, packed: packing.Packed, seen: Tensor | None = None, context: Tensor | None = None) -> Tensor:
    return forward.decode(net, packed, forward.embed(net, packed, context, seen))


def test_a_request_gives_the_same_alone_as_among_others(net: BagelNet) -> None:
    torch.manual_seed(1)
    seen, context = torch.rand(1, 3, 70, 70), torch.randn(1, 16, 64)
    request = [*packing.pictured(0), packing.text(LONG)]
    alone = hidden(net, pack([request]), seen, context)
    among = hidden(net, pack([[packing.text(SHORT)]], [[packing.text(LONG)], request]), seen, context)
    assert torch.allclose(among[-len(alone) :], alone, atol=1e-5)


def test_attention_equals_that_of_the_model(net: BagelNet) -> None:
    packed = pack([[packing.text(LONG)], [packing.text(SHORT), Part("vae", picture=0)]])
    x = forward.embed(net, packed, torch.randn(1, 16, 64), None)
    theirs = net.decode(x, packed.positions, MaskedAttention(packed.masks[0], batch=2), is_gen=packed.is_gen)
    assert torch.allclose(forward.decode(net, packed, x), theirs, atol=1e-5)


def test_velocities_change_with_time_noise_and_text(net: BagelNet) -> None:
    def velocity(ids: tuple[int, ...], noisy: Tensor, t: float) -> Tensor:
        packed = pack([[packing.text(ids), Part("made", picture=0)]])
        return forward.velocities(net, packed, forward.embed(net, packed, None, None), noisy, torch.tensor([t]))

    noise = torch.randn(1, 16, 64)
    plain = velocity(LONG, noise, 0.5)
    assert plain.shape == (1, 16, 64)
    for other in (velocity(SHORT, noise, 0.5), velocity(LONG, noise + 1, 0.5), velocity(LONG, noise, 0.9)):
        assert not torch.allclose(other, plain, atol=1e-4)


def test_quick_norms_have_the_values_and_slopes_of_plain_ones() -> None:
    torch.manual_seed(0)
    plain, fast = RMSNorm(16, 1e-6), RMSNorm(16, 1e-6)
    plain.weight.data.normal_()
    fast.load_state_dict(plain.state_dict())
    quick.speed_up(fast)
    x, by = torch.randn(7, 3, 16, requires_grad=True), torch.randn(7, 3, 16)
    theirs = torch.autograd.grad((plain(x) * by).sum(), [x, plain.weight])
    ours = torch.autograd.grad((fast(x) * by).sum(), [x, fast.weight])
    assert torch.allclose(fast(x), plain(x), atol=1e-6)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(ours, theirs, strict=True))
