"""Fine-tuning as it is done now: a transformer is frozen, and clients train LoRA adapters; beside it, all weights.

    pip install 'fedlesam[huggingface]'
    python examples/fine_tune_lora.py lora
    python examples/fine_tune_lora.py full
    python examples/fine_tune_lora.py lora 512 4 runs/lora    # width, rounds, run folder: repeat it to resume

The transformer is made from a config, so that nothing is downloaded; for real work it is
`AutoModelForSequenceClassification.from_pretrained(FOLDER)`.
"""

import resource
import sys

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2ForSequenceClassification

import fedlesam as fl

TOPICS, WORDS, LENGTH = 4, 400, 24


def backbone(width: int = 128, layers: int = 4) -> nn.Module:
    """A GPT-2 that tells topics apart; its weights depend on this seed alone, as pretrained ones would be fixed."""
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": width, "n_layer": layers, "n_head": 4}
    return GPT2ForSequenceClassification(GPT2Config(**sizes, **ends, num_labels=TOPICS))


def with_adapters(model: nn.Module, rank: int = 4) -> nn.Module:
    """Adapters of some rank beside every attention layer and a new head; all else is frozen."""
    where = {"target_modules": ["c_attn"], "fan_in_fan_out": True}  # of GPT-2
    return get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_CLS, r=rank, lora_alpha=2 * rank, **where))


def texts(clients: int, samples: int, seed: int, skew: float = 3.0) -> list[dict[str, torch.Tensor]]:
    """Token numbers as a tokenizer makes them; each topic has words that it prefers, each client topics."""
    draw = torch.Generator().manual_seed(seed)
    likes = torch.ones(TOPICS, WORDS)
    likes[:, 0] = 0  # padding
    for topic in range(TOPICS):
        likes[topic, 1 + 40 * topic : 41 + 40 * topic] = 40
    made = []
    for _ in range(clients):
        mix = torch.rand(TOPICS, generator=draw) ** skew
        labels = torch.multinomial(mix, samples, replacement=True, generator=draw)
        tokens = torch.multinomial(likes[labels], LENGTH, replacement=True, generator=draw)
        made.append({"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels})
    return made


def federation(mode: str, width: int = 128, clients: int = 8, samples: int = 40) -> fl.Federation:
    """FedLESAM with AdamW, on adapters (`lora`) or on all weights (`full`)."""
    model = with_adapters(backbone(width)) if mode == "lora" else backbone(width)
    lr = 1e-2 if mode == "lora" else 1e-3
    local = fl.LocalTraining(lr=lr, optimizer="adamw", steps=4, batch_size=10, weight_decay=0.0)
    return fl.Federation(
        model,
        texts(clients, samples, seed=1),
        "fedlesam",
        local,
        task=fl.Task.huggingface(),
        active=4,
        test=texts(1, 200, seed=2, skew=0.0)[0],
        execution=fl.Execution(threads=1),
    )


def main(mode: str = "lora", width: str = "128", rounds: str = "10", out: str | None = None) -> None:
    """Train, and print what it cost.

    Args:
        mode: `lora` or `full`.
        width: Of the transformer.
        rounds: How many.
        out: A run folder; by default nothing is written.
    """
    before = resource.getrusage(resource.RUSAGE_SELF)
    fed = federation(mode, int(width))
    history = fed.fit(int(rounds), out=out)
    after = resource.getrusage(resource.RUSAGE_SELF)
    size, all_weights = fed.weights.numel(), sum(p.numel() for p in fed.model.parameters())
    print(f"{mode}: {size:,} of {all_weights:,} weights are trained")
    last, seconds = history[-1], after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"a round: {last.bytes_down / 1e6:.2f} MB down, {last.bytes_up / 1e6:.2f} MB up")
    print(f"CPU seconds of a round and its evaluation: {seconds / len(history):.2f}")
    print(f"a client keeps {max(fed.memories[c].nbytes for c in fed.memories) / 1e6:.2f} MB between its rounds")
    print(f"memory of the process: {(after.ru_maxrss - before.ru_maxrss) / 1e3:.0f} MB more at its peak")
    print(f"test accuracy {last.test_accuracy:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
