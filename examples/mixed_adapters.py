"""Generate with several adapters in one batch, on a tiny random model, and check each row against PEFT's merged model.

    python examples/mixed_adapters.py --model gpt_oss          # or qwen3_moe, mixtral, olmoe, deepseek_v3, nemotron_h

Needs transformers and peft: pip install "moelora_ops[test]".
"""

import argparse
import copy
import tempfile
import warnings
from pathlib import Path

import peft
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moelora_ops.integrations.transformers import enable

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, num_experts_per_tok=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
MODELS = {
    "qwen3_moe": dict(num_experts=6, moe_intermediate_size=24),
    "mixtral": dict(num_local_experts=4),
    "gpt_oss": dict(num_local_experts=4, layer_types=["sliding_attention", "full_attention"], sliding_window=16),
    "olmoe": dict(num_experts=6),
    "deepseek_v3": dict(
        n_routed_experts=8,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        num_key_value_heads=4,
        head_dim=4,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        n_shared_experts=1,
    ),  # fmt: skip
    "nemotron_h": dict(
        layers_block_type=["moe", "attention", "moe"],
        n_routed_experts=6,
        moe_intermediate_size=24,
        n_group=1,
        topk_group=1,
        moe_shared_expert_intermediate_size=24,
        num_hidden_layers=3,
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=8,
    ),  # fmt: skip
}


def make_model(name: str, seed: int = 0) -> torch.nn.Module:
    """A tiny model with random weights, large enough that experts and attention matter."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**SIZES, **MODELS[name]})).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


def make_adapter(model: torch.nn.Module, folder: Path, rank: int, seed: int) -> torch.nn.Module:
    """Save a random PEFT adapter on experts and attention; returns a copy of the model with the adapter merged."""
    torch.manual_seed(seed)
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters() if ".experts." in name}
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=r".*\.(self_attn|mixer)\.[qkvo]\w*_proj\w*",
        target_parameters=[f"experts.{name}" for name in names & {"gate_up_proj", "up_proj", "down_proj"}],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(copy.deepcopy(model), config)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        adapted.save_pretrained(folder)
        return adapted.merge_and_unload()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3_moe")
    name = parser.parse_args(arguments).model
    model = make_model(name)
    with tempfile.TemporaryDirectory() as folder:
        merged = {f"adapter{i}": make_adapter(model, Path(folder, f"adapter{i}"), 2 + 2 * i, seed=i) for i in range(3)}
        enabled = enable(model, max_loras=4, max_rank=8)
        for adapter in merged:
            report = enabled.load(Path(folder, adapter), adapter)
            print(f"{adapter}: rank {report.rank}, experts of layers {report.expert_layers}, {len(report.linears)} linears")

    prompts = torch.randint(2, 64, (5, 6), generator=torch.Generator().manual_seed(0))
    rows = ["adapter0", None, "adapter2", "adapter1", "adapter0"]
    with enabled.adapters(rows):
        tokens = model.generate(prompts, max_new_tokens=8, do_sample=False)
    same = []
    for prompt, adapter, row in zip(prompts, rows, tokens):
        alone = model if adapter is None else merged[adapter]
        expected = alone.generate(prompt[None], max_new_tokens=8, do_sample=False)[0]
        same.append(torch.equal(row, expected))
        print(f"{adapter or 'base':9} {row[6:].tolist()}  as {'the base' if adapter is None else 'PEFT merged'}: {same[-1]}")
    if not all(same):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
