"""A small copy of a model's architecture with random weights: same class and code, few layers, narrow matrices."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn

from .layout import ModelLayout

MAX_PARAMETERS = 30_000_000  # of a clone; more would take seconds
MAX_LAYERS = 16
VOCAB = 128
WINDOW = 6  # of sliding and chunked attention: shorter than the rows of the check

# Configuration fields that models share. Widths become at most the clone's hidden size, the others a number.
INNER_WIDTHS = (
    "intermediate_size", "intermediate_size_mlp", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff", "block_ff_dim",
    "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "lru_width",
)  # fmt: skip
SMALL = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "linear_num_heads"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size"), WINDOW),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 16),
}  # fmt: skip


def tiny_clone(model: nn.Module, layout: ModelLayout, num_layers: int) -> nn.Module | None:
    """A clone on the CPU in float32 and evaluation mode; draws from torch's default generator.

    Args:
        model: may be on meta.
        num_layers: at least so many layers; more where it takes more to have every kind of layer.

    Returns:
        None if no smaller configuration makes a model of this class.
    """
    layers = min(layout.num_layers, max(num_layers, covering_layers(model, layout)))
    for config in shrunken_configs(model.config, layout.num_layers, layers):
        try:
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in type(model)(copy.deepcopy(config)).parameters())
            if size > MAX_PARAMETERS:
                continue
            with torch.device("cpu"):
                clone = type(model)(config).float().eval()
        except Exception:  # whatever the model's own code says to sizes that do not fit each other
            continue
        _stir(clone)
        return clone
    return None


@torch.no_grad()
def _stir(model: nn.Module) -> None:
    # Fresh weights are too orderly: norms at 1 and biases at 0 hide a part that is left out or applied twice.
    for parameter in model.parameters():
        parameter.requires_grad_(True)
        std = 0.5 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
        parameter.add_(torch.randn_like(parameter), alpha=std)


def covering_layers(model: nn.Module, layout: ModelLayout) -> int:
    """Layers from the first on that have one of every kind, at most `MAX_LAYERS`."""
    config = model.config.get_text_config()
    per_layer = [values for values in vars(config).values() if _is_per_layer(values, layout.num_layers)]
    seen: set[tuple] = set()
    needed = 1
    for index, layer in enumerate(list(model.get_submodule(layout.layers))[:MAX_LAYERS]):
        listed = [str(v[index]) for v in per_layer if isinstance(v[index], (str, bool)) or v[index] in (0, 1, None)]
        kind = (*_structure(layer), *listed)
        if kind not in seen:
            seen.add(kind)
            needed = index + 1
    return needed


def _structure(layer: nn.Module) -> Iterator[tuple]:
    """Classes of a layer's modules and their flags: attention type, a window or none, rotary or none."""
    for name, module in layer.named_modules():
        yield name, type(module).__name__
        for key, value in sorted(vars(module).items()):
            if not key.startswith("_") and isinstance(value, (bool, str, type(None))):
                yield name, key, value


def _is_per_layer(values, num_layers: int) -> bool:
    return isinstance(values, (list, tuple)) and len(values) == num_layers


def shrunken_configs(config, num_layers: int, keep: int) -> Iterator:
    """Configurations with the first `keep` of `num_layers` layers, the smallest first.

    Not all of them need to make a model: sizes may depend on each other in ways that only the model's code knows.
    """
    for narrow, few_tokens in ((True, True), (False, True), (False, False)):
        small = copy.deepcopy(config)
        small.__dict__.pop("quantization_config", None)
        if "flash" in str(getattr(small, "_attn_implementation", "")):
            small._attn_implementation = "eager"  # flash kernels run on GPUs only
        text = small.get_text_config()
        try:
            _keep_layers(text, num_layers, keep)
            if few_tokens:
                _shrink_vocabulary(text)
            if narrow:
                _shrink_widths(text)
                _shrink_towers(small, text)
        except Exception:  # a configuration class may validate each field by itself
            continue
        yield small


def _keep_layers(config, num_layers: int, keep: int) -> None:
    for name, values in list(vars(config).items()):
        if _is_per_layer(values, num_layers):
            setattr(config, name, values[:keep])
    config.num_hidden_layers = keep


def _shrink_vocabulary(config) -> None:
    config.vocab_size = VOCAB
    for name, value in list(vars(config).items()):
        if name.endswith("token_id") and isinstance(value, int) and value >= VOCAB:
            setattr(config, name, 0 if name == "pad_token_id" else 1)


def _shrink_widths(config) -> None:
    """Two heads of their own size, which rotary tables depend on; all else follows from it."""
    hidden = config.hidden_size
    heads = _integer(config, "num_attention_heads")
    if heads:
        head_size = _integer(config, "head_dim") or hidden // heads
        width = 2 * head_size
        config.num_attention_heads = 2
        for name in ("num_key_value_heads", "num_kv_heads"):
            if _integer(config, name):
                setattr(config, name, 2 if getattr(config, name) == heads else 1)
        # Linear attention (Qwen3-Next): value heads are a multiple of key heads.
        if keys := _integer(config, "linear_num_key_heads"):
            config.linear_num_value_heads //= keys
            config.linear_num_key_heads = 1
    else:
        width = min(hidden, 64)
    config.hidden_size = width
    for name in INNER_WIDTHS:
        if _integer(config, name):
            setattr(config, name, min(width, getattr(config, name)))
    if _integer(config, "word_embed_proj_dim"):  # OPT; another one than the hidden size where it is projected
        config.word_embed_proj_dim = width if config.word_embed_proj_dim == hidden else width // 2
    _shrink_state_spaces(config, width, bool(heads))
    for name, value in SMALL.items():
        if _integer(config, name) > value:
            setattr(config, name, value)


def _shrink_state_spaces(config, width: int, has_attention: bool) -> None:
    """Mamba and its hybrids: the inner width is a multiple of the hidden size, and heads divide it."""
    if not has_attention and _integer(config, "expand"):
        config.intermediate_size = config.expand * width
        if _integer(config, "num_heads"):  # Mamba 2
            config.num_heads = config.expand * width // config.head_dim
    if _integer(config, "mamba_n_heads"):
        inner = int(getattr(config, "mamba_expand", 2) * width)
        head_size = min(_integer(config, "mamba_d_head") or 64, inner)
        config.mamba_n_heads, config.mamba_d_head = inner // head_size, head_size
        if _integer(config, "mamba_d_ssm"):
            config.mamba_d_ssm = inner


def _shrink_towers(config, text) -> None:
    """One layer for the vision or audio tower of a model whose text is all that is trained here."""
    for name in getattr(config, "sub_configs", {}):
        tower = getattr(config, name, None)
        if tower is not None and tower is not text and _integer(tower, "num_hidden_layers"):
            tower.num_hidden_layers = 1


def _integer(config, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
