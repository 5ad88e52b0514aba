"""Shared fixtures: a tiny random target and drafter for every test, the demo's real ones where marked `model`."""

import os

import pytest
import torch

torch.set_num_threads(1)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TINY_LAYER_IDS = (0, 2, 3)


def make_tiny_target(seed: int = 0, **overrides):
    """A random Llama of 4 layers with 6 q and 2 KV heads, in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    options = dict(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, eos_token_id=1, pad_token_id=1,
        bos_token_id=0, tie_word_embeddings=False, initializer_range=0.2,
    )
    model = LlamaForCausalLM(LlamaConfig(**{**options, **overrides})).float().eval()
    model.generation_config.eos_token_id = model.config.eos_token_id
    return model


def make_tiny_drafter(seed: int = 1, **overrides):
    """A random drafter of 2 layers that fits `make_tiny_target`."""
    from dflash_paged.drafter import DraftModel, read_draft_config

    torch.manual_seed(seed)
    config = dict(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=512,
        block_size=5, num_target_layers=4,
        dflash_config={"target_layer_ids": list(TINY_LAYER_IDS), "mask_token_id": 3},
    )
    model = DraftModel(read_draft_config({**config, **overrides}))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.freeze()


@pytest.fixture(scope="session")
def tiny_target():
    """A tiny random transformers target."""
    return make_tiny_target()


@pytest.fixture(scope="session")
def tiny_drafter():
    """A tiny random drafter that fits `tiny_target`."""
    return make_tiny_drafter()


@pytest.fixture(scope="session")
def real_model():
    """The demo's target and tokenizer, loaded once a worker (10 to 20 s)."""
    from dflash_paged.models import find_target, load_target_model

    return load_target_model(find_target())


@pytest.fixture(scope="session")
def real_drafter():
    """The shipped drafter in fp32."""
    from dflash_paged.drafter import load_drafter
    from dflash_paged.models import find_drafter

    return load_drafter(find_drafter())
