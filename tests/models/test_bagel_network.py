"""The decoder in its three surroundings: a mask over a batch, plain memory and pages; and that it can be trained."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvlab.attention.store import KVStore
from kvlab.attention.torch_paged import TorchPagedAttention
from kvlab.errors import InputError, IntegrityError
from kvlab.models.bagel.attending import ContiguousAttention, ContiguousRow, MaskedAttention, through_pages
from kvlab.models.bagel.config import AutoencoderConfig, BagelConfig, SpecialIds, VisionConfig
from kvlab.models.bagel.mot import Experts
from kvlab.models.bagel.network import BagelNet, gen_mask
from kvlab.models.bagel.patches import grid_positions, patchify, unpatchify
from kvlab.models.textlm import TextConfig
from kvlab.spec import KVLayout, StepRow, StepTables

CONFIG = BagelConfig(
    text=TextConfig(64, 32, 48, 2, 4, 2, 8, 128, rope_theta=1e4, qkv_bias=True),
    vision=VisionConfig(24, 48, 1, 2, 4, 4),
    autoencoder=AutoencoderConfig(16, (1, 1), 1, 4, norm_groups=8),
    max_latent_side=4,
    special=SpecialIds(60, 61, 62, 63),
)
GRID = (2, 3)
SEEN = [(0, 6), (6, 12), (12, 20)]  # a text, a picture that is looked at, latents between markers


@pytest.fixture
def net() -> BagelNet:
    torch.manual_seed(0)
    net = BagelNet(CONFIG)
    net.fill_tables()
    for p in net.parameters():
        if p.requires_grad and p.ndim == 1:
            p.data.add_(0.1 * torch.randn(p.shape))  # norms and biases that are not all alike
    return net


def embedded(net: BagelNet, batch: int = 2) -> Tensor:
    """Return a batch of a text, a picture and latents, [batch, 20, hidden_size]."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 60, (batch, 6), generator=generator)
    pixels = torch.randn(batch, 3, 8, 8, generator=generator)
    latents = torch.randn(batch, 6, CONFIG.latent_width, generator=generator)
    times = torch.linspace(0.2, 0.9, batch)
    parts = (
        net.embed_text(ids),
        net.between_markers(net.embed_picture(pixels)),
        net.between_markers(net.embed_latents(latents, GRID, times)),
    )
    return torch.cat(parts, dim=1)


def positions() -> Tensor:
    return torch.cat((torch.arange(6), torch.full((6,), 6), torch.full((8,), 7)))


def is_gen() -> Tensor:
    return torch.cat((torch.zeros(12, dtype=torch.bool), gen_mask(6)))


def mask() -> Tensor:
    seen = torch.ones(20, 20, dtype=torch.bool).tril()
    for start, stop in SEEN[1:]:
        seen[start:stop, start:stop] = True
    return seen


def trained_way(net: BagelNet, x: Tensor) -> Tensor:
    return net.decode(x, positions(), MaskedAttention(mask(), batch=len(x)), is_gen=is_gen())


def test_gradients_reach_every_weight_but_the_fixed_tables(net):
    x = embedded(net)
    hidden = trained_way(net, x)
    loss = net.velocity(hidden[:, 13:-1]).square().mean() + net.logits(hidden[:, :6]).square().mean()
    loss.backward()
    without = {name for name, p in net.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
    assert without == {"vit_pos_embed.pos_embed", "latent_pos_embed.pos_embed"}


def test_a_gradient_is_the_slope_of_the_loss(net):
    net.double()
    weight = net.language_model.model.layers[0].mlp_moe_gen.up_proj.weight
    x = embedded(net).detach()

    def loss() -> Tensor:
        return net.velocity(trained_way(net, x)[:, 13:-1]).square().sum()

    loss().backward()
    slope = weight.grad[5, 7].item()
    with torch.no_grad():
        weight[5, 7] += 1e-6
        high = loss()
        weight[5, 7] -= 2e-6
        assert slope == pytest.approx(float(high - loss()) / 2e-6, rel=1e-4)


@torch.no_grad()
def test_one_batch_under_a_mask_is_the_walks_one_by_one(net):
    x = embedded(net)
    whole = trained_way(net, x)
    attention = ContiguousAttention(CONFIG.text, capacity=20)
    for start, stop in SEEN:
        attention.begin([ContiguousRow("a", stop - start), ContiguousRow("b", stop - start)], causal=start == 0)
        at, gen = positions()[start:stop].repeat(2), is_gen()[start:stop].repeat(2)
        hidden = net.decode(x[:, start:stop].reshape(-1, 32), at, attention, is_gen=gen)
        attention.finish()
        torch.testing.assert_close(hidden.view(2, -1, 32), whole[:, start:stop], rtol=0, atol=2e-6)
    assert attention.length("a") == attention.length("b") == 20


@torch.no_grad()
@pytest.mark.parametrize("commit", [True, False])
def test_pages_are_plain_memory(net, commit):
    x = embedded(net, batch=1)[0]
    plain = ContiguousAttention(CONFIG.text, capacity=40)
    store = KVStore(KVLayout(2, 2, 8, 4), 20)
    pages = TorchPagedAttention(store, num_heads=4)
    plain.begin([ContiguousRow("a", 6)])
    net.decode(x[:6], positions()[:6], plain)
    plain.finish()
    pages.begin(StepTables(4, (StepRow(1, "main", [7, 3], 6, 6),)))
    net.decode(x[:6], positions()[:6], through_pages(pages))
    plain.begin([ContiguousRow("a", 14)], causal=False, commit=commit)
    expected = net.decode(x[6:], positions()[6:], plain, is_gen=is_gen()[6:])
    plain.finish()
    row = StepRow(1, "main", [7, 3, 9, 2, 5], 20, 14) if commit else StepRow(1, "main", [7, 3], 6, 14)
    pages.begin(StepTables(4, (row,), causal=False, commit=commit))
    torch.testing.assert_close(net.decode(x[6:], positions()[6:], through_pages(pages), is_gen=is_gen()[6:]), expected)
    assert plain.length("a") == (20 if commit else 6)


@torch.no_grad()
def test_a_fork_goes_its_own_way(net):
    attention = ContiguousAttention(CONFIG.text, capacity=8)
    attention.begin([ContiguousRow("main", 3)])
    net.decode(net.embed_text([1, 2, 3]), torch.arange(3), attention)
    attention.finish()
    attention.fork("main", "other")

    def next_of(stream: str, token: int) -> Tensor:
        attention.begin([ContiguousRow(stream, 1)])
        hidden = net.decode(net.embed_text([token]), torch.tensor([attention.length(stream)]), attention)
        attention.finish()
        return hidden

    assert torch.equal(next_of("main", 4), next_of("other", 4))
    assert not torch.equal(next_of("main", 5), next_of("other", 6))
    with pytest.raises(IntegrityError, match="holds 5 slots and 4 more pass 8"):
        attention.begin([ContiguousRow("main", 4)])


@torch.no_grad()
def test_only_latents_go_through_the_weights_that_draw(net):
    x = embedded(net, batch=1)
    before = trained_way(net, x)
    for name, p in net.language_model.named_parameters():
        if "_moe_gen" in name:
            p.mul_(1.5)
    after = trained_way(net, x)
    assert torch.equal(before[:, :12], after[:, :12])  # neither text nor a picture that is looked at
    assert torch.equal(net.logits(before[:, :12]), net.logits(after[:, :12]))
    assert ((before - after).abs().amax(dim=-1)[0, 13:19] > 1e-4).all()


def test_experts_keep_the_order_of_tokens():
    is_gen = torch.tensor([False, True, True, False, True])
    x = torch.arange(5.0)[:, None]
    out = Experts.of(is_gen).apply(x, lambda x: x, lambda x: -x)
    assert out[:, 0].tolist() == [0, -1, -2, 3, -4]
    assert Experts.of(torch.zeros(3, dtype=torch.bool)).gen is None
    assert Experts.of(torch.ones(3, dtype=torch.bool)).und is None


def test_tokens_and_positions_must_be_as_many(net):
    with pytest.raises(InputError, match="3 tokens were given 2 positions"):
        net.language_model.model(net.embed_text([1, 2, 3]), torch.arange(2), Experts(), MaskedAttention(mask()))


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_patches_of_any_shape_go_together_again(lead):
    picture = torch.randn(*lead, 3, 6, 10)
    patches = patchify(picture, 2)
    assert patches.shape == (*lead, 15, 12)
    assert torch.equal(
        patches.reshape(-1, 15, 12)[0, 6], picture.reshape(-1, 3, 6, 10)[0, :, 2:4, 2:4].movedim(0, -1).flatten()
    )
    assert torch.equal(unpatchify(patches, (3, 5), 2), picture)


def test_pictures_that_do_not_fit_are_refused(net):
    with pytest.raises(InputError, match="6 x 7 is not cut evenly into patches of 2"):
        patchify(torch.zeros(3, 6, 7), 2)
    with pytest.raises(InputError, match="5 x 1 patches does not fit a table of 4 x 4"):
        grid_positions((5, 1), 4)
    with pytest.raises(InputError, match="does not fit a table of 4 x 4"):
        net.embed_latents(torch.zeros(10, CONFIG.latent_width), (2, 5), 0.0)
