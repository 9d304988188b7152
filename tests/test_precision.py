"""Each decoder layer in 16 bits is at most twice as far from fp64 as plain torch in the same type.

A layer stands in a model of its own, with its final norm, whose embedding holds the layer's inputs: those of the layer
in the whole model in fp64, rounded. Torch computes it with transformers' eager attention, the engine as it serves: in
prefill chunks and decode steps over scattered blocks of a cache that is NaN where nothing was written. Weights and
inputs are the same rounded numbers in all three.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
import triton

from hookline.checkpoint.module import ModuleReader
from hookline.config import EngineConfig
from hookline.execution.kv_cache import allocate_cache
from hookline.loading import load_model
from hookline.model import CacheTensors, ForwardBatch, TransformerModel

ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret
ALLOWED = 2.0
BLOCK_SIZE = 16

SMALL = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "heads": (4, 2), "head_dim": 64}
REAL = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "heads": (8, 2), "head_dim": 128}
# Tokens of each request; the last so many of each are decoded one by one, what is before comes in two chunks.
SMALL_LENGTHS, REAL_LENGTHS = (70, 33), (600, 257, 40)
DECODED = 6

Part = tuple[int, int, int]  # request, first position, tokens


def whole_model(heads: tuple[int, int], dtype: torch.dtype, **fields: Any) -> transformers.LlamaForCausalLM:
    """In fp64, with weights that `dtype` holds; wide enough that attention has favourites."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **fields,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        vocab_size=8,
        max_position_embeddings=2048,
        initializer_range=1.6 * fields["hidden_size"] ** -0.5,
        attn_implementation="eager",
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype).double().eval()


def layer_model(
    whole: transformers.LlamaForCausalLM, index: int, inputs: torch.Tensor, dtype: torch.dtype
) -> transformers.LlamaForCausalLM:
    """A model of one layer of `whole`, whose token ids are the rows of `inputs` [T, M]."""
    config = copy.deepcopy(whole.config)
    config.num_hidden_layers, config.vocab_size = 1, len(inputs)
    model = transformers.LlamaForCausalLM(config).double()
    model.model.layers[0].load_state_dict(whole.model.layers[index].state_dict())
    model.model.norm.load_state_dict(whole.model.norm.state_dict())
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(inputs)
    return model.to(dtype).eval()


@torch.inference_mode()
def by_torch(model: transformers.LlamaForCausalLM, lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Outputs [T, M] of all requests, each on its own."""
    model, outputs, first = model.to(device), [], 0
    for length in lengths:
        ids = torch.arange(first, first + length, device=device)[None]
        outputs.append(model.model(ids, use_cache=False).last_hidden_state[0].double().cpu())
        first += length
    return torch.cat(outputs)


def serving_steps(lengths: tuple[int, ...]) -> Iterator[list[Part]]:
    """Prefill chunks of unequal length, a decode beside a chunk, then decodes of all."""
    prompts = [length - DECODED for length in lengths]
    halves = [prompt // 2 + 1 for prompt in prompts]
    yield [(request, 0, half) for request, half in enumerate(halves)]
    yield [(0, halves[0], prompts[0] - halves[0])]
    yield [(0, prompts[0], 1)] + [(r, halves[r], prompts[r] - halves[r]) for r in range(1, len(lengths))]
    for step in range(DECODED):
        yield [(r, prompts[r] + step, 1) for r in range(len(lengths)) if (r, step) != (0, 0)]


def forward_batch(
    parts: list[Part], firsts: list[int], tables: torch.Tensor, cache: Any, device: torch.device
) -> ForwardBatch:
    """The tensors of a step, decodes first."""
    requests = torch.tensor([request for request, _, _ in parts])
    counts = torch.tensor([count for _, _, count in parts])
    positions = torch.cat([torch.arange(start, start + count) for _, start, count in parts])
    owner = requests.repeat_interleave(counts)
    blocks = tables[owner, positions // BLOCK_SIZE].long()
    contexts = torch.tensor([start + count for _, start, count in parts], dtype=torch.int32)
    tensors = {
        "token_ids": torch.tensor(firsts)[owner] + positions,
        "positions": positions,
        "slots": blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        "block_tables": tables[requests],
        "query_starts": torch.cat([torch.zeros(1), counts.cumsum(0)]).int(),
        "context_lens": contexts,
        "logits_rows": torch.arange(len(positions)),
    }
    return ForwardBatch(
        **{name: tensor.to(device) for name, tensor in tensors.items()},
        num_decodes=sum(count == 1 for _, _, count in parts),
        max_query_len=int(counts.max()),
        max_context_len=int(contexts.max()),
        rope_lengths=None,
        cache=cache,
    )


@torch.inference_mode()
def by_engine(model: TransformerModel, lengths: tuple[int, ...]) -> torch.Tensor:
    """The same as `by_torch`, as the engine serves."""
    width = -(-max(lengths) // BLOCK_SIZE)
    order = 1 + torch.randperm(len(lengths) * width, generator=torch.Generator().manual_seed(1))
    tables = order.view(len(lengths), width).int()
    cache = allocate_cache(model.cache_specs(), 1 + tables.numel(), BLOCK_SIZE, model.device)
    layers: list[CacheTensors] = [layer for group in cache.values() for layer in group]
    for layer in layers:
        for entry in layer.values():
            entry.fill_(float("nan"))
    firsts = [sum(lengths[:request]) for request in range(len(lengths))]
    outputs = torch.full((sum(lengths), model.shapes.hidden_size), float("nan"), dtype=torch.float64)
    for parts in serving_steps(lengths):
        batch = forward_batch(parts, firsts, tables, cache, model.device)
        outputs[batch.token_ids.cpu()] = model.forward(batch).double().cpu()
    return outputs


def errors(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Worst and RMS."""
    difference = (found - expected).abs()
    return float(difference.max()), float(difference.square().mean().sqrt())


def check_layers(shape: dict[str, Any], lengths: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    whole = whole_model(dtype=dtype, **shape)
    name = str(dtype).removeprefix("torch.")
    hidden = torch.randn(sum(lengths), shape["hidden_size"], generator=torch.Generator().manual_seed(2)).double()
    for index in range(shape["num_hidden_layers"]):
        inputs = hidden.to(dtype).double()
        exact = layer_model(whole, index, inputs, torch.float64)
        half = layer_model(whole, index, inputs, dtype)
        expected = by_torch(exact, lengths, torch.device("cpu"))
        options: dict[str, Any] = {"dtype": name, "device": str(device), "block_size": BLOCK_SIZE}
        ours = load_model(EngineConfig("layer", **options), ModuleReader(half)).opened.model  # which copies the weights
        pairs = zip(
            errors(by_engine(ours, lengths), expected), errors(by_torch(half, lengths, device), expected), strict=True
        )
        for what, (found, plain) in zip(("worst", "RMS"), pairs, strict=True):
            text = f"layer {index} in {name}: {what} error {found:.3e}, plain torch {plain:.3e}, {found / plain:.2f}"
            print(text)
            assert found <= ALLOWED * plain, text  # false for NaN too
        hidden = before_norm(exact, lengths)


@torch.inference_mode()
def before_norm(model: transformers.LlamaForCausalLM, lengths: tuple[int, ...]) -> torch.Tensor:
    """What a layer's model gives to the norm at its end: the next layer's input."""
    seen: list[torch.Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0][0]))
    by_torch(model, lengths, torch.device("cpu"))
    handle.remove()
    return torch.cat(seen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_layers_on_the_cpu(dtype: torch.dtype) -> None:
    check_layers(SMALL, SMALL_LENGTHS, dtype, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_layers_on_the_gpu(dtype: torch.dtype) -> None:
    check_layers(REAL, REAL_LENGTHS, dtype, torch.device("cuda"))
