"""Reading checkpoints: plain bf16, the release's FP8 and FP4 form, and what is wrong with a broken one."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dscompile.distributed.placement import Placement, PlacementError
from dscompile.distributed.sharding import placement_for, sharded_experts
from dscompile.formats import FORMATS
from dscompile.models.deepseek_v41 import CheckpointError, DeepseekV41Config, DeepseekV41ForCausalLM
from dscompile.models.deepseek_v41.checkpoint_names import release_name, stored_tensors
from dscompile.models.deepseek_v41.config_names import FLAT_NAMES
from dscompile.models.deepseek_v41.engram import EngramTable
from dscompile.models.deepseek_v41.linear import Linear
from dscompile.models.deepseek_v41.moe import Experts
from tests.support.ranks import fake_group

Model = DeepseekV41ForCausalLM
Make = Callable[..., Model]

IDS = torch.randint(0, 64, (1, 11), generator=torch.Generator().manual_seed(3))

# Linear layers that the release keeps in BF16.
PLAIN_LINEAR = ("compressor.wkv", "compressor.wgate", "indexer.wk", "indexer.weights_proj", "head")


def logits(model: Model) -> Tensor:
    return model(IDS, torch.arange(11).unsqueeze(0), model.new_cache(1, 16))


def plain_tensors(model: Model) -> dict[str, Tensor]:
    """A bf16 checkpoint of `model` under the release's names, every expert on its own."""
    out = {}
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            small = parameter.dim() >= 2 and "hc_" not in name
            out[release_name(name)] = (parameter.bfloat16() if small else parameter).clone()
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            inner = module.w13.shape[1] // 2
            for e in range(len(module.w13)):
                parts = {"w1": module.w13[e, :inner], "w3": module.w13[e, inner:], "w2": module.w2[e]}
                for matrix, weight in parts.items():
                    out[f"{release_name(path)}.{e}.{matrix}.weight"] = weight.bfloat16().contiguous()
    return out


def block_quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> E4M3 codes and one UE8M0 scale per 32 x 32 block, by the release's rule for a block's largest value."""
    rows, columns = -(-weight.shape[0] // 32), -(-weight.shape[1] // 32)
    padded = torch.nn.functional.pad(weight, (0, columns * 32 - weight.shape[1], 0, rows * 32 - weight.shape[0]))
    largest = padded.view(rows, 32, columns, 32).abs().amax((1, 3)).clamp(min=1e-4)
    exponents = torch.ceil(torch.log2(largest / 448))
    scale = torch.exp2(exponents).repeat_interleave(32, 0).repeat_interleave(32, 1)
    codes = (padded / scale).clamp(-448, 448).to(torch.float8_e4m3fn)[: weight.shape[0], : weight.shape[1]]
    return codes.contiguous(), (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def released_tensors(model: Model) -> dict[str, Tensor]:
    """The same in the release's form: FP8 linear layers and Engram tables, FP4 experts, UE8M0 scales."""
    out = plain_tensors(model)
    for path, module in model.named_modules():
        name = release_name(path)
        if isinstance(module, Linear) and not path.endswith(PLAIN_LINEAR):
            out[f"{name}.weight"], out[f"{name}.scale"] = block_quantised(module.weight.float())
        if isinstance(module, EngramTable):
            payload, scales = FORMATS["fp8_g32_ue8m0"].encode(module.weight.float())
            out[f"{name}.weight"] = payload.view(torch.float8_e4m3fn)
            out[f"{name}.scale"] = scales.view(torch.float8_e8m0fnu)
    for name in [name for name in out if ".ffn.experts." in name]:
        payload, scales = FORMATS["fp4_g32_ue8m0"].encode(out[name].float())
        out[name] = payload.view(torch.int8)
        out[name.replace(".weight", ".scale")] = scales.view(torch.float8_e8m0fnu)
    return out


def write(folder: Path, config: DeepseekV41Config, tensors: dict[str, Tensor], shards: int = 1) -> Path:
    flat = {key: getattr(config, name) for key, name in FLAT_NAMES.items()}
    (folder / "inference").mkdir(parents=True)
    (folder / "inference" / "config.json").write_text(json.dumps(flat))
    names = sorted(tensors)
    where = {name: f"model-{i % shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, folder / file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


@pytest.fixture(scope="module")
def source(make_model: Make) -> Model:
    """A model whose values are exact in bf16."""
    model = make_model(seed=5)
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    return model


@pytest.fixture(scope="module")
def plain(source: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("plain"), source.config, plain_tensors(source))


@pytest.fixture(scope="module")
def released(source: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    extra = {"vision.blocks.0.weight": torch.zeros(2), "mtp.0.norm.weight": torch.zeros(3)}
    extra["layers.0.ffn.gate.bias_vl"] = torch.zeros(8)
    return write(tmp_path_factory.mktemp("released"), source.config, {**released_tensors(source), **extra}, shards=3)


def token_map(model: Model) -> Tensor:
    return model.token_map


def test_plain_checkpoint(source: Model, plain: Path) -> None:
    model = Model.from_pretrained(plain, dtype=torch.float32, token_map=token_map(source), progress=False)
    assert logits(model).equal(logits(source))
    half = Model.from_pretrained(plain, token_map=token_map(source), progress=False)
    assert half.layers[0].attn.wq_a.weight.dtype == torch.bfloat16
    assert torch.cosine_similarity(logits(half), logits(source), dim=-1).median() > 0.98


def test_released_checkpoint(source: Model, released: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="dscompile.models"):
        dense = Model.from_pretrained(released, dtype=torch.float32, token_map=token_map(source), progress=False)
    assert "1 draft, 2 vision tensors" in caplog.text
    packed = Model.from_pretrained(
        released, dtype=torch.float32, weights="packed", token_map=token_map(source), progress=False
    )
    assert logits(packed).equal(logits(dense))
    experts = packed.layers[0].ffn.experts
    assert experts.w13.dtype == torch.uint8 and experts.w13.shape[-1] == source.config.hidden_size // 2
    assert packed.layers[0].attn.wo_a.weight.dtype == torch.float8_e4m3fn
    assert dense.engrams["1"].embed.weight.dtype == torch.uint8  # tables stay as they are stored
    # Dequantised values are near the source's: FP8 to a sixteenth, FP4 experts within a few tenths of their norm.
    error = (dense.layers[0].attn.wq_b.weight - source.layers[0].attn.wq_b.weight).abs()
    assert 0 < error.max() <= source.layers[0].attn.wq_b.weight.abs().max() / 16
    mine, theirs = dense.layers[0].ffn.experts.w13, source.layers[0].ffn.experts.w13
    assert 0.05 < (mine - theirs).norm() / theirs.norm() < 0.2
    want = FORMATS["fp4_g32_ue8m0"].fake_quant(theirs)
    assert mine.equal(want)


def test_packed_model_is_smaller(make_model: Make) -> None:
    def held(weights: str) -> int:
        model = make_model(dtype=torch.bfloat16, weights=weights)
        return sum(p.numel() * p.element_size() for layer in model.layers for p in layer.ffn.experts.parameters())

    assert held("packed") == held("dequantised") * 17 // 64  # 4.25 bits instead of 16


def test_packed_wants_a_packed_checkpoint(source: Model, plain: Path) -> None:
    with pytest.raises(CheckpointError, match=r"wrong shape or dtype: .*BF16, allowed: .*I8"):
        Model.from_pretrained(plain, weights="packed", token_map=token_map(source), progress=False)


def test_one_error_lists_everything(source: Model, tmp_path: Path) -> None:
    tensors = plain_tensors(source)
    del tensors["norm.weight"], tensors["layers.1.attn.indexer.wk.weight"]
    tensors["layers.0.attn.unknown"] = torch.zeros(1)
    tensors["layers.3.attn.kv_norm.weight"] = torch.zeros(31)
    tensors["layers.2.ffn.experts.7.w1.weight"] = torch.zeros(32, 64, dtype=torch.int32)
    folder = write(tmp_path / "broken", source.config, tensors)
    with pytest.raises(CheckpointError) as error:
        Model.from_pretrained(folder, token_map=token_map(source), progress=False)
    text = str(error.value)
    assert "2 missing: layers.1.attn.indexer.wk.weight, norm.weight" in text
    assert "1 extra: layers.0.attn.unknown" in text
    assert "2 wrong shape or dtype" in text and "layers.3.attn.kv_norm.weight: [31], allowed: [32]" in text


def test_missing_scales_are_missing(source: Model, tmp_path: Path) -> None:
    tensors = released_tensors(source)
    del tensors["layers.0.attn.wq_a.scale"], tensors["layers.0.ffn.experts.0.w1.scale"]
    folder = write(tmp_path / "broken", source.config, tensors)
    with pytest.raises(CheckpointError, match="2 missing: layers.0.attn.wq_a.scale, layers.0.ffn.experts.0.w1.scale"):
        Model.from_pretrained(folder, token_map=token_map(source), progress=False)


def test_empty_folders(tmp_path: Path, source: Model) -> None:
    with pytest.raises(FileNotFoundError, match="config.json"):
        Model.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="no \\*.safetensors"):
        Model.from_pretrained(write(tmp_path / "bare", source.config, {}))


def test_token_map_is_needed_and_checked(source: Model, plain: Path) -> None:
    with pytest.raises(FileNotFoundError, match="token_map"):
        Model.from_pretrained(plain, progress=False)
    with pytest.raises(ValueError, match="token_map has 3 compressed ids"):
        Model.from_pretrained(plain, token_map=torch.arange(64) % 3, progress=False)


def test_progress_bar_goes_to_stderr(source: Model, plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Model.from_pretrained(plain, token_map=token_map(source))
    printed = capsys.readouterr()
    assert printed.out == "" and "safetensors" in printed.err


def test_released_tensor_count() -> None:
    """The release has 93,418 tensors outside its vision and draft parts; 40 of them are the vision router biases."""
    with torch.device("meta"):
        model = Model(DeepseekV41Config(), dtype=torch.bfloat16, weights="packed", random=False)
    names = set()
    for name, stored in stored_tensors(model).items():
        kept_plain = any(part in name for part in PLAIN_LINEAR)
        dtype = next((d for d in ("F8_E4M3", "I8") if d in stored.shapes and not kept_plain), "BF16")
        _, scale = stored.shapes[dtype]
        names |= {name} if scale is None else {name, stored.scale_name}
    assert len(names) == 93_418 - 40
    assert "layers.14.engram.embed.scale" in names and "layers.39.ffn.experts.383.w2.scale" in names


@pytest.mark.parametrize("weights", ["dequantised", "packed"])
def test_experts_of_one_rank(source: Model, plain: Path, released: Path, weights: str) -> None:
    """Rank 1 of 4 makes room for its slots alone, replicas included, and reads just those."""
    experts = source.config.n_routed_experts
    order = [*range(experts), 2, 5, 5, 1]
    placement = Placement(tuple(order[i * 5 % len(order)] for i in range(len(order))), experts, 4)
    folder = plain if weights == "dequantised" else released
    options = {"dtype": torch.float32, "weights": weights, "token_map": token_map(source), "progress": False}
    whole = Model.from_pretrained(folder, **options)
    with fake_group(1, 4) as group:
        own = Model.from_pretrained(folder, **options, expert_mesh=group, placement=placement)
        spread = sharded_experts(own, group)
        assert len(spread.layers) == len(own.layers) and spread.layers[0].name == "layers.0.ffn.experts"
        assert spread.held_bytes * experts == spread.whole_bytes * placement.slots_per_rank
        held = torch.tensor(placement.on_rank(1))
        for mine, theirs in zip(own.layers, whole.layers):
            for name, tensor in theirs.ffn.experts.named_parameters():
                assert getattr(mine.ffn.experts, name).equal(tensor[held])
        rest = {name for name, _ in own.named_parameters() if ".experts.w" not in name}
        assert all(own.get_parameter(name).equal(whole.get_parameter(name)) for name in rest)
        with pytest.raises(RuntimeError, match="MoE holds only this rank's experts"):
            logits(own)
        with pytest.raises(PlacementError, match="8 experts on 3 ranks"):
            placement_for("experts", None, experts, 3)
    with pytest.raises(ValueError, match="not spread, allowed: shard_experts first"):
        sharded_experts(whole, None)
