"""What head and loss of a language model take, by the share of rows that have a label, beside whole logits.

One process, fp32, norm and head of a language model over 2048 rows of width 256, a vocabulary of 8192: forward and
backward to rows and weights. Peak is what operators allocate at most besides rows and weights, gradients included; time
is the median of several rounds, both ways in turns.

  whole    logits of every row, then torch's cross entropy, as transformers' models do it
  ours     logits of labelled rows alone, an eighth of all rows at a time, made again in backward
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import arguments, report, write_json
from benchmarks.measuring import CPU, peak_bytes, seconds_in_turns
from hetero_strategy.model.inputs import IGNORE, Packing, SequenceInputs
from hetero_strategy.zoo import titan_llama
from hetero_strategy.zoo.titan import TitanLlama

SHARES = (0.05, 0.25, 1.0)


def ways(model: TitanLlama, inputs: SequenceInputs) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Loss of rows, by way."""

    def whole(rows: torch.Tensor) -> torch.Tensor:
        logits = model.head(rows)
        return F.cross_entropy(logits.float(), inputs.labels, ignore_index=IGNORE, reduction="sum")

    return {"whole": whole, "ours": lambda rows: model.score(rows, inputs).loss_sum}


def measure(
    rows: int,
    vocabulary: int,
    dim: int,
    share: float,
    rounds: int,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    warm_up: float = 0.0,
) -> dict[str, Any]:
    """Peak bytes, seconds and loss of both ways; ``warm_up`` is in seconds."""
    sizes = {"vocab_size": vocabulary, "dim": dim, "n_layers": 1, "n_heads": 8}
    llm = titan_llama(**sizes).to_empty(device=device)
    llm.head_rows = min(llm.head_rows, rows // 8)
    with torch.no_grad():
        for parameter in llm.parameters():
            parameter.normal_(std=0.02)
    llm.to(dtype)
    numbers = torch.Generator().manual_seed(0)
    labels = torch.randint(0, vocabulary, (rows,), generator=numbers)
    labels[torch.rand(rows, generator=numbers) >= share] = IGNORE
    inputs = SequenceInputs(labels.clamp(0), labels, Packing.of([rows])).to(device)  # type: ignore[arg-type]
    hidden = torch.randn(rows, dim, generator=numbers).to(device, dtype).requires_grad_()

    def once(loss_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        loss = loss_of(hidden)
        loss.backward()
        hidden.grad = None
        llm.zero_grad(set_to_none=True)
        return loss.detach()

    runs = {name: partial(once, loss_of) for name, loss_of in ways(llm, inputs).items()}
    found = {name: {"loss": float(run()), "peak": peak_bytes(run, device)} for name, run in runs.items()}
    seconds = seconds_in_turns(runs, device, rounds, warm_up=warm_up)
    return {name: {**found[name], "seconds": statistics.median(seconds[name])} for name in runs}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Print the table; returns its figures by share."""
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(argv)
    table, figures = [], {}
    for share in SHARES:
        found = measure(given.rows, given.vocabulary, given.dim, share, given.rounds)
        figures[f"{share:.0%}"] = found
        peaks = [found[way]["peak"] / 1e6 for way in ("whole", "ours")]
        seconds = [found[way]["seconds"] for way in ("whole", "ours")]
        apart = abs(found["ours"]["loss"] / found["whole"]["loss"] - 1)
        sizes = (*(f"{x:.0f}" for x in peaks), peaks[1] / peaks[0])
        table.append([f"{share:.0%}", *sizes, *seconds, seconds[1] / seconds[0], f"{apart:.0e}"])
    columns = ("labelled", "whole MB", "ours MB", "ratio", "whole s", "ours s", "ratio", "losses differ by")
    report("head", "Head and loss, forward and backward", columns, table)
    write_json(given.json, "head", "cpu", {k: v for k, v in vars(given).items() if k != "json"}, figures)
    return figures


if __name__ == "__main__":
    main()
