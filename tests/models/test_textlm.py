"""TextLM against transformers' own Llama and Qwen2, and TextModel as the engine uses it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvlab.attention.store import KVStore
from kvlab.attention.torch_paged import TorchPagedAttention
from kvlab.errors import InputError, IntegrityError, LoadError
from kvlab.models.layers import Linear, RopeScaling, RotaryEmbedding
from kvlab.models.text import TextModel, weights_version
from kvlab.models.textlm import TextConfig, TextLM
from kvlab.models.tracer import ToyProcessor
from kvlab.spec import KVLayout, Match, PromptRecord, RowInputs, StepRow, StepTables

PAGE = 4
MAX_LOGIT_ERROR = 2.5e-5  # of the standard deviation of the logits
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-llama3": {"rope_parameters": LLAMA3},
    "llama-wide-heads": {"head_dim": 16, "num_key_value_heads": 6},
    "qwen2": {},
    "qwen2-tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
}


def reference(variant: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """transformers' model with random weights, biases and norms."""
    transformers = pytest.importorskip("transformers")
    family = "Llama" if variant.startswith("llama") else "Qwen2"
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **VARIANTS[variant]})
    net = getattr(transformers, f"{family}ForCausalLM")(config).eval().to(dtype)
    with torch.no_grad():
        for name, param in net.named_parameters():
            param.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return net


def network(config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> TextLM:
    net = TextLM.allocate(TextConfig.from_hf(config), dtype=dtype)
    net.load_weights(tensors.items())
    return net


def ours(reference_net: Any, dtype: torch.dtype = torch.float32) -> TextLM:
    return network(reference_net.config.to_dict(), reference_net.state_dict(), dtype)


def small(**changes: Any) -> TextLM:
    """A network of our own with random weights, where no reference is needed."""
    torch.manual_seed(3)
    net = TextLM.allocate(TextConfig(97, 48, 80, 2, 6, 2, 8, 256, **changes))
    for param in net.parameters():
        param.normal_(0.0, 0.2)
    return net


class Pages:
    """Runs rows of ids through a network over pages; remembers how far each row is written."""

    def __init__(self, net: TextLM, num_pages: int = 200) -> None:
        self.net = net
        config, dtype = net.config, str(net.dtype).removeprefix("torch.")
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, PAGE, dtype=dtype, compute_dtype=dtype)
        self.attention = TorchPagedAttention(KVStore(layout, num_pages), num_heads=config.num_heads)
        self.free = list(range(num_pages - 1, 0, -1))
        self.pages: dict[int, list[int]] = {}
        self.done: dict[int, int] = {}

    def step(self, parts: Mapping[int, Sequence[int]], logits_from: int | None = 0) -> list[Tensor | None]:
        rows, inputs = [], []
        for rid, ids in parts.items():
            start = self.done.get(rid, 0)
            stop = self.done[rid] = start + len(ids)
            pages = self.pages.setdefault(rid, [])
            pages += [self.free.pop() for _ in range(-(-stop // PAGE) - len(pages))]
            rows.append(StepRow(rid, "main", tuple(pages), stop, len(ids)))
            inputs.append(RowInputs(ids, range(start, stop), logits_from))
        self.attention.begin(StepTables(PAGE, tuple(rows)))
        return self.net(inputs, self.attention)


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_logits(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    error = (got.double() - expected.double()).abs().max() / expected.double().std()
    assert error <= MAX_LOGIT_ERROR, f"largest difference is {error:.2e} of the standard deviation"


@torch.no_grad()
def expected_logits(net: Any, ids: Sequence[int]) -> Tensor:
    logits: Tensor = net(torch.tensor([list(ids)])).logits[0]
    return logits


# -- the same logits as transformers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_in_one_prefill(variant: str, dtype: torch.dtype) -> None:
    # 150 tokens: past the 32 positions that the llama3 variant was first trained on.
    theirs, ids = reference(variant, dtype), random_ids(150)
    (got,) = Pages(ours(theirs, dtype)).step({1: ids})
    assert got is not None
    assert got.dtype == dtype
    assert_logits(got, expected_logits(theirs, ids))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_in_chunks_and_decode(variant: str) -> None:
    theirs, ids = reference(variant), random_ids(90)
    paged = Pages(ours(theirs))
    parts = [ids[:50], ids[50:67], ids[67:80], *([i] for i in ids[80:])]
    got = torch.cat([logits for part in parts for logits in paged.step({1: part}) if logits is not None])
    assert_logits(got, expected_logits(theirs, ids))


def test_rows_of_different_lengths_in_one_step_each_equal_transformers() -> None:
    theirs = reference("llama-llama3")
    rows = {rid: random_ids(count, rid) for rid, count in ((1, 3), (2, 71), (3, 30))}
    paged = Pages(ours(theirs))
    paged.step({2: rows[2][:40]})
    outs = paged.step({1: rows[1][:2], 2: rows[2][40:70], 3: rows[3][:29]})
    last = paged.step({rid: ids[-1:] for rid, ids in rows.items()})
    for ids, first, decoded in zip(rows.values(), outs, last, strict=True):
        assert first is not None
        assert decoded is not None
        got = torch.cat([first, decoded])
        assert_logits(got, expected_logits(theirs, ids)[-len(got) :])


def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16() -> None:
    theirs, ids = reference("llama"), random_ids(40)
    (got,) = Pages(ours(theirs, torch.bfloat16)).step({1: ids})
    exact, rounded = expected_logits(theirs, ids), expected_logits(reference("llama", torch.bfloat16), ids)
    assert got is not None
    assert got.dtype == torch.float32
    assert (got - exact).pow(2).mean() <= 1.2 * (rounded - exact).pow(2).mean()


def test_float32_angles_survive_a_cast_of_the_network() -> None:
    rotary = RotaryEmbedding(64, 1e5, RopeScaling(4.0, 1.0, 4.0, 64))
    positions = torch.tensor([8191])
    before = rotary(positions, torch.float32).cos.clone()
    assert torch.equal(rotary.to(torch.bfloat16)(positions, torch.float32).cos, before)


# -- which logits ------------------------------------------------------------------------------------------------------


def test_logits_come_only_for_the_rows_and_tokens_that_want_them() -> None:
    net, a, b, c = small(), random_ids(9, 1), random_ids(5, 2), random_ids(7, 3)
    everything = [Pages(net).step({1: ids})[0] for ids in (a, b, c)]
    paged = Pages(net)
    rows = [RowInputs(a, range(9), 8), RowInputs(b, range(5), None), RowInputs(c, range(7), 3)]
    paged.attention.begin(
        StepTables(
            PAGE, tuple(StepRow(i, "main", pages, n, n) for i, pages, n in ((1, [1, 2, 3], 9), (2, [4, 5], 5), (3, [6, 7], 7)))
        )
    )
    first, second, third = net(rows, paged.attention)
    assert second is None
    torch.testing.assert_close(first, everything[0][8:])
    torch.testing.assert_close(third, everything[2][3:])


def test_a_step_that_wants_no_logits_still_writes_its_pages() -> None:
    net, ids = small(), random_ids(12)
    paged, whole = Pages(net), Pages(net)
    assert paged.step({1: ids[:8]}, logits_from=None) == [None]
    torch.testing.assert_close(paged.step({1: ids[8:]})[0], whole.step({1: ids})[0][8:])


def test_ids_and_positions_of_different_lengths_are_refused() -> None:
    with pytest.raises(IntegrityError, match="2 ids and 3 positions"):
        small()([RowInputs([1, 2], [0, 1, 2])], Pages(small()).attention)


def test_the_network_leaves_no_trace_in_autograd() -> None:
    (logits,) = Pages(small()).step({1: [1, 2, 3]})
    assert logits is not None
    assert not logits.requires_grad


# -- hooks and changed weights -----------------------------------------------------------------------------------------


def test_a_hook_on_any_submodule_changes_the_result() -> None:
    net, ids = small(), random_ids(6)
    (before,) = Pages(net).step({1: ids})
    names = [
        name for name, module in net.named_modules() if name and name != "rotary" and not isinstance(module, nn.ModuleList)
    ]
    assert len(names) == 3 + 2 * 9
    for name in names:
        hook = net.get_submodule(name).register_forward_hook(lambda module, args, out: out * 1.5 + 0.1)
        (hooked,) = Pages(net).step({1: ids})
        hook.remove()
        assert not torch.allclose(before, hooked, rtol=1e-3), name
    assert torch.equal(Pages(net).step({1: ids})[0], before)


def test_what_a_hook_keeps_is_not_overwritten_later() -> None:
    net, kept = small(), []
    for name, module in net.named_modules():
        if name and name != "rotary":
            module.register_forward_hook(lambda module, args, out: kept.append((out, out.clone())))
    Pages(net).step({1: random_ids(6)})
    assert kept
    assert all(torch.equal(out, copy) for out, copy in kept)


def replace_module(net: TextLM) -> None:
    net.layers[1].mlp = type(net.layers[1].mlp)(48, 80)


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.load_state_dict(net.state_dict()),
        lambda net: net.layers[0].mlp.down_proj.weight.mul_(2),
        lambda net: net.norm.weight.fill_(1),
        lambda net: setattr(net.norm, "weight", nn.Parameter(net.norm.weight.clone())),
        lambda net: net.layers[1].self_attn.register_forward_hook(lambda *_: None),
        lambda net: net.lm_head.register_forward_pre_hook(lambda *_: None),
        lambda net: setattr(net.layers[0].mlp, "forward", lambda x: x),
        lambda net: net.to(torch.float64),
        replace_module,
    ],
)
def test_weights_version_moves_with_every_change_in_place(change: Any) -> None:
    net = small()
    before = weights_version(net)
    Pages(net).step({1: [1, 2]})
    assert weights_version(net) == before
    change(net)
    assert weights_version(net) != before
    assert weights_version(net) == weights_version(net)


def test_a_removed_hook_gives_the_version_back() -> None:
    net = small()
    before = weights_version(net)
    net.norm.register_forward_hook(lambda *_: None).remove()
    assert weights_version(net) == before


def test_weights_that_count_no_versions_are_taken_for_changed() -> None:
    net = small()
    with torch.inference_mode():
        net.norm.weight = nn.Parameter(torch.ones(48), requires_grad=False)
    assert weights_version(net) != weights_version(net)


def test_weights_allocated_under_inference_mode_count_versions_all_the_same() -> None:
    with torch.inference_mode():
        net = small()
    assert weights_version(net) == weights_version(net)


def test_weights_version_is_cheap() -> None:
    net = TextLM.allocate(TextConfig(97, 48, 80, 30, 6, 2, 8, 256))
    assert 180 <= len(list(net.parameters())) <= 300
    times = []
    for _ in range(20):
        start = time.process_time()
        weights_version(net)
        times.append(time.process_time() - start)
    assert min(times) < 2e-3  # 0.3 ms where it was measured


# -- configs -----------------------------------------------------------------------------------------------------------

CONFIG = {**SIZES, "model_type": "llama"}


def test_head_dim_kv_heads_and_theta_have_hugging_faces_defaults() -> None:
    config = TextConfig.from_hf({k: v for k, v in CONFIG.items() if k != "num_key_value_heads"})
    assert (config.head_dim, config.num_kv_heads, config.rope_theta, config.tied) == (8, 6, 10000.0, False)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_theta": None}},
        {"rope_theta": 5e5, "rope_scaling": {**{k: v for k, v in LLAMA3.items() if k[:4] != "rope"}, "type": "llama3"}},
    ],
)
def test_rope_fields_are_found_wherever_a_version_of_the_config_keeps_them(rope: dict[str, Any]) -> None:
    config = TextConfig.from_hf({**CONFIG, **rope})
    assert (config.rope_theta, config.rope_scaling) == (5e5, RopeScaling(4.0, 1.0, 4.0, 32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "model_type 'mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"model_type": "qwen2", "attention_bias": False}, "attention_bias is False"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "llama3"}}, "no field factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "sliding_window is 64",
        ),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ({"num_key_value_heads": 4}, "6 attention heads do not share 4"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"vocab_size": None}, "no field vocab_size"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3'"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": "x"}, "hidden_size is 'x'"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rope_theta": "x"}, "rope_theta is 'x'"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_scaling": "x"}, "rope_scaling is 'x'"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]"),
        ({"rope_scaling": LLAMA3 | {"factor": "x"}}, "factor is 'x'"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 0}}, "original_max_position_embeddings is 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
        ({"layer_types": 3}, "layer_types is 3"),
        ({"use_sliding_window": "x"}, "use_sliding_window is 'x'"),
        ({"max_window_layers": "x"}, "max_window_layers is 'x'"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused_by_field_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        TextConfig.from_hf({**CONFIG, **changes})


def test_a_sliding_window_that_no_layer_uses_is_no_obstacle() -> None:
    off = {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}
    above = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}
    assert TextConfig.from_hf({**CONFIG, **off}) == TextConfig.from_hf({**CONFIG, **above})


# -- weights -----------------------------------------------------------------------------------------------------------


def checkpoint(variant: str = "llama") -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    net = reference(variant)
    config: Any = net.config
    return config.to_dict(), dict(net.state_dict())


def test_missing_tensors_are_named() -> None:
    config, tensors = checkpoint("qwen2")
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    with pytest.raises(LoadError, match=r"1 of \d+ tensors are missing.*model.layers.1.self_attn.k_proj.bias"):
        network(config, tensors)


def test_an_untied_head_must_be_there() -> None:
    config, tensors = checkpoint()
    del tensors["lm_head.weight"]
    with pytest.raises(LoadError, match="lm_head.weight"):
        network(config, tensors)


@pytest.mark.parametrize("given", [True, False])
def test_a_tied_head_is_the_embedding_whether_the_checkpoint_repeats_it_or_not(given: bool) -> None:
    config, tensors = checkpoint("llama-tied")
    tensors.pop("lm_head.weight", None)
    if given:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    net = network(config, tensors)
    assert net.lm_head.weight is net.embed_tokens.weight
    assert torch.equal(net.lm_head.weight, tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.3.mlp.up_proj.weight", torch.zeros(80, 48), "'model.layers.3.mlp.up_proj.weight' has no place"),
        ("model.norm.weight", torch.zeros(47), r"'model.norm.weight' has shape \[47\] where \[48\] is needed"),
        ("model.norm.weight", torch.zeros(48, dtype=torch.int8), "torch.int8, not floats"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(name: str, tensor: Tensor, message: str) -> None:
    config, tensors = checkpoint()
    with pytest.raises(LoadError, match=message):
        network(config, {**tensors, name: tensor})


def test_a_tensor_that_comes_twice_is_refused() -> None:
    config, tensors = checkpoint()
    net = TextLM.allocate(TextConfig.from_hf(config))
    with pytest.raises(LoadError, match=r"'model.norm.weight' comes twice"):
        net.load_weights([*tensors.items(), ("model.norm.weight", tensors["model.norm.weight"])])


def test_buffers_that_old_checkpoints_carry_are_passed_over() -> None:
    config, tensors = checkpoint()
    network(config, {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})


def test_loading_writes_into_the_memory_that_was_allocated() -> None:
    config, tensors = checkpoint()
    net = TextLM.allocate(TextConfig.from_hf(config))
    addresses = [param.data_ptr() for param in net.parameters()]
    net.load_weights(tensors.items())
    assert [param.data_ptr() for param in net.parameters()] == addresses


def test_half_precision_checkpoints_load_as_their_values() -> None:
    config, tensors = checkpoint()
    net = network(config, {name: tensor.bfloat16() for name, tensor in tensors.items()})
    assert torch.equal(net.norm.weight, tensors["model.norm.weight"].bfloat16().float())


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("sizes", [(16, 48), (48, 16)])
def test_linear_is_nn_linear_in_every_layout(rows: int, sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    plain, fast = nn.Linear(*sizes), Linear(*sizes)
    fast.store_by_input()
    fast.load_state_dict(plain.state_dict())
    x = torch.randn(rows, sizes[0])
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), plain(x))
    fast(x).sum().backward()
    assert fast.weight.grad is not None


# -- the model as the engine sees it -----------------------------------------------------------------------------------


def model(**options: Any) -> TextModel:
    return TextModel(small(), ToyProcessor(97), name="tiny", identity="tiny sha256:0", **options)


def test_the_schedule_decodes_only_when_the_prefill_is_not_enough() -> None:
    record = PromptRecord({"tokens": [1, 2, 3]})
    assert [model().schedule(record, n) for n in (0, 1, 2)] == [("prefill",), ("prefill",), ("prefill", "decode")]


def test_decode_runs_the_token_sampled_last_and_waits_for_one() -> None:
    record = PromptRecord({"tokens": [1, 2, 3]})
    prefill, decode = model().prepare_inputs("prefill", record, []), model().prepare_inputs("decode", record, [7, 8])
    assert prefill is not None
    assert decode is not None
    assert (list(prefill.ids["main"]), list(decode.ids["main"])) == ([1, 2, 3], [8])
    assert model().prepare_inputs("decode", record, []) is None


def test_what_the_cache_holds_is_cut_from_the_front() -> None:
    inputs = model().prepare_inputs("prefill", PromptRecord({"tokens": [1, 2, 3]}), [])
    assert inputs is not None
    assert list(model().split_inputs("prefill", inputs, {"main": Match(2, 2)}).ids["main"]) == [3]


def test_an_unknown_walk_is_refused() -> None:
    with pytest.raises(InputError, match="no walk 'prefil'"):
        model().prepare_inputs("prefil", PromptRecord({"tokens": [1]}), [])


def test_every_declared_walk_is_one_the_model_runs() -> None:
    for streams in model().prefix_key_streams().values():
        for stream in streams.values():
            assert stream.walks() <= set(model().walks())


def test_pages_have_the_shape_of_the_network_and_the_dtype_asked_for() -> None:
    assert model().kv_layout(8) == KVLayout(2, 2, 8, 8, dtype="float32", compute_dtype="float32")
    assert model().kv_layout(8, "bfloat16") == KVLayout(2, 2, 8, 8, dtype="bfloat16", compute_dtype="float32")


def test_max_seq_len_may_shorten_the_context_only() -> None:
    assert (model().max_seq_len, model(max_seq_len=64).max_seq_len) == (256, 64)
    with pytest.raises(InputError, match="max_seq_len is 257"):
        model(max_seq_len=257)
