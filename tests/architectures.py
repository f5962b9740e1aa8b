"""Tiny configurations of the architectures that must split: random weights, few layers, every layer type among them."""

from __future__ import annotations

import copy

import torch
import transformers

VOCAB = 97
TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# Most configurations name their sizes like Llama's.
LLAMA = {
    **TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
# A width and a number of layers, for those that have no key-value heads.
PLAIN = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
GPT = {**TOKENS, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip

# Name: model class and configuration.
ARCHITECTURES: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": 6}),
    "qwen2": ("Qwen2ForCausalLM", {**LLAMA, "use_sliding_window": True, "max_window_layers": 2, "sliding_window": 6}),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**LLAMA, **EXPERTS, "head_dim": 8, "mlp_only_layers": [1]}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {
            **LLAMA, **EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 16, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        },
    ),
    "gemma": ("GemmaForCausalLM", {**LLAMA, "head_dim": 16}),
    "gemma2": (
        "Gemma2ForCausalLM", {**LLAMA, **SLIDING, "head_dim": 16, "query_pre_attn_scalar": 16},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            **LLAMA, **SLIDING, "head_dim": 16, "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "smollm3": (
        "SmolLM3ForCausalLM", {**LLAMA, "no_rope_layers": [1, 1, 0, 1], "tie_word_embeddings": True},
    ),
    "phi": ("PhiForCausalLM", {**LLAMA, "num_key_value_heads": 4}),
    "phi3": ("Phi3ForCausalLM", {**LLAMA, "sliding_window": 6}),
    "olmo2": ("Olmo2ForCausalLM", LLAMA),
    "cohere": ("CohereForCausalLM", {**LLAMA, "use_qk_norm": True, "logit_scale": 0.25}),
    "stablelm": ("StableLmForCausalLM", {**LLAMA, "use_parallel_residual": True, "qk_layernorm": True}),
    "starcoder2": ("Starcoder2ForCausalLM", {**LLAMA, "sliding_window": 6}),
    "gpt_neox": ("GPTNeoXForCausalLM", {**PLAIN, "rotary_pct": 0.5}),
    "gptj": ("GPTJForCausalLM", {**GPT, "rotary_dim": 4}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            **TOKENS, "hidden_size": 32, "num_layers": 4, "num_heads": 4, "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 2]], "window_size": 6,
        },
    ),
    "codegen": ("CodeGenForCausalLM", {**GPT, "rotary_dim": 4}),
    "mixtral": ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **LLAMA, **LATENT, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 8,
            "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {**LLAMA, **SLIDING, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "llama4_text": (
        "Llama4ForCausalLM",
        {
            **LLAMA, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2, "no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 6,
        },
    ),
    "granite": (
        "GraniteForCausalLM",
        {
            **LLAMA, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
            "attention_multiplier": 0.2,
        },
    ),
    "glm4": ("Glm4ForCausalLM", {**LLAMA, "head_dim": 8}),
    "exaone4": ("Exaone4ForCausalLM", {**LLAMA, **SLIDING, "sliding_window_pattern": "LG"}),
    "nemotron": ("NemotronForCausalLM", LLAMA),
    "lfm2": (
        "Lfm2ForCausalLM",
        {**LLAMA, "layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_ff_dim": 48},
    ),
    "mamba": (
        "MambaForCausalLM", {**TOKENS, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 8, "time_step_rank": 4},
    ),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", {**GPT, "multi_query": True}),
    "opt": (
        "OPTForCausalLM",
        {**PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 16},
    ),
    "falcon": ("FalconForCausalLM", {**PLAIN, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_alibi": ("FalconForCausalLM", {**PLAIN, "alibi": True, "multi_query": False}),
    "bloom": ("BloomForCausalLM", {**TOKENS, "hidden_size": 32, "n_layer": 4, "n_head": 4}),
    "mpt": ("MptForCausalLM", {**TOKENS, "d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 64}),
}  # fmt: skip
# The fast suite's; all of them take part in `make test-all`.
FAST = (
    "llama", "qwen3", "gemma2", "gemma3", "gpt2", "mixtral", "smollm3", "opt", "phi3", "granite", "mamba", "bloom",
)  # fmt: skip


def make_architecture(name: str, seed: int = 0, **overrides):
    """A model of the table in float32 and evaluation mode, with weights that make every part matter."""
    class_name, sizes = ARCHITECTURES[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(seed)
    # A copy: configurations keep the lists that they are given.
    config = model_class.config_class(**copy.deepcopy({**sizes, **overrides}))
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms off 1 and biases off 0: applying one twice, or another's, then shows.
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def make_batch(rows: int = 4, length: int = 12, left: bool = False, seed: int = 1) -> dict[str, torch.Tensor]:
    """Rows of different lengths, the last one padding throughout its labels, some labels masked."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCAB, (rows, length), generator=generator)
    mask = torch.ones_like(tokens)
    for row in range(1, rows):
        missing = slice(0, row * 2) if left else slice(length - row * 2, length)
        mask[row, missing] = 0
    labels = torch.where(mask.bool(), tokens, -100)
    labels[0, :3] = -100
    labels[-1] = -100
    return {"input_ids": torch.where(mask.bool(), tokens, 0), "attention_mask": mask, "labels": labels}
