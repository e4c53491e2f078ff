"""A finished run as its stages would leave it: real manifests, summary, metrics and figures, no data and no model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import polars as pl

from eyrie.config import Config, parse_config
from eyrie.formats.manifest import Manifest, RowCounts, manifest_path, stats_path
from eyrie.formats.publish import publish, write_json

CONFIG: dict[str, Any] = {
    "run": "demo-135m",
    "target": {"model": "data/targets/smollm2-135m"},
    "sampling": {"max_tokens": 192},
    "datasets": {
        "code": {"adapter": "human-eval", "token_budget": 24000, "tokens_per_shard": 12000, "prompts_per_shard": 82},
        "instructions": {
            "adapter": "bfcl", "tools": "drop", "token_budget": 45000, "tokens_per_shard": 15000,
            "prompts_per_shard": 200,
        },
        "writing": {"adapter": "writingbench", "token_budget": 30000, "tokens_per_shard": 15000},
        "chat": {"adapter": "chitchat", "token_budget": 45000, "tokens_per_shard": 15000},
        "dialogue": {
            "adapter": "chitchat", "kind": "native", "token_budget": 12000, "tokens_per_shard": 6000, "weight": 0.5,
        },
    },
    "tokenize": {"max_length": 640},
    "merge": {"draft_vocab_size": 8192},
    "drafters": {"eagle3": {"ttt_steps": 3, "epochs": 3}},
}  # fmt: skip
LENGTHS = {"code": (2.21, 1.69), "instructions": (1.84, 1.37), "writing": (1.61, 1.38), "chat": (1.79, 1.44)}
IDENTITY = {"target": "a1" * 32, "tokenizer": "b2" * 32, "template": "c3" * 32}


class FakeRun:
    """Writes the record of a run, stage by stage, under ``root``; ``folder`` is ``results/<run>``."""

    def __init__(self, root: Path, config: dict[str, Any] | None = None) -> None:
        self.raw = json.loads(json.dumps(config or CONFIG))
        self.root = root
        self.config: Config = parse_config(self.raw)
        self.folder = root / "results" / self.config.run
        self.folder.mkdir(parents=True)

    def everything(self) -> FakeRun:
        self.target()
        self.shards()
        self.merge()
        for name in self.config.drafters:
            self.train(name)
            for suite in self.config.bench.suites:
                self.bench(name, suite)
        return self

    def manifest(self, data: Path, stage: str, rows: RowCounts, size: int, seconds: float | None, **more: Any) -> None:
        data.parent.mkdir(parents=True, exist_ok=True)
        sha = f"{len(data.name):02x}" * 32
        made = Manifest(stage=stage, file=data.name, sha256=sha, bytes=size, rows=rows, identity=IDENTITY, **more)
        manifest_path(data).write_text(made.dump())
        if seconds is not None:
            write_json(stats_path(data), {"seconds": seconds / 1.7, "cpu_seconds": seconds})

    def target(self) -> None:
        card = {
            "model": self.config.target.model, "revision": None, "architecture": "LlamaForCausalLM",
            "model_type": "llama", "num_layers": 30, "hidden_size": 576, "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "rms_norm_eps": 1e-5, "rope_theta": 1e5,
            "max_position_embeddings": 8192, "tied_embeddings": True, "dtype": "bfloat16", "stop_ids": [2],
            "special_ids": [0, 1, 2], **IDENTITY,
        }  # fmt: skip
        write_json(self.folder / "target.json", card)

    def shards(self) -> None:
        for name, dataset in self.config.datasets.items():
            for shard in dataset.shards:
                self.shard(name, shard)

    def shard(self, name: str, shard: str) -> None:
        dataset = self.config.datasets[name]
        budget = dataset.shard_budget(shard)
        prompts = min(dataset.prompts_per_shard, budget // 60)
        source = RowCounts(read=prompts + 9, kept=prompts, dropped={"duplicate": 6, "empty_content": 3})
        self.manifest(
            self.root / "data" / "prompts" / name / f"{shard}.jsonl.zst", "ingest", source, 210 * prompts, None
        )
        completion, answers, cut = budget + 61, budget // 150, budget // 900
        if dataset.kind == "answered":
            self.manifest(
                self.folder / "responses" / name / f"{shard}.jsonl.zst", "generate",
                RowCounts(read=prompts, kept=answers, dropped={"beyond_budget": prompts - answers}),
                5 * completion, completion / 290,
                tokens={"prompt": answers * 74, "completion": completion},
                facts={"truncated": cut, "token_budget": budget, "budget_filled": True},
            )  # fmt: skip
            made = completion - cut * dataset.sampling.max_tokens
            rows = RowCounts(read=answers, kept=answers - cut, dropped={"truncated": cut})
        else:
            made, rows = completion, RowCounts(read=answers + 4, kept=answers, dropped={"over_budget": 4})
        tokens = {"total": made + 74 * rows.kept, "completion": made, "prompt": 74 * rows.kept}
        self.manifest(
            self.folder / "tokens" / name / f"{shard}.parquet", "tokenize", rows, 3 * made, 0.4, tokens=tokens
        )
        self.manifest(
            self.folder / "hidden" / name / f"{shard}.safetensors", "hidden",
            RowCounts(read=rows.kept, kept=rows.kept), tokens["total"] * 3456 + made * 1152, tokens["total"] / 800,
            tokens={"total": tokens["total"], "supervised": made},
        )  # fmt: skip

    def merge(self) -> None:
        read = kept = 0
        datasets, left_out = {}, {"cross_dataset_duplicate": 0, "held_out_prompt": 0}
        for name, dataset in self.config.datasets.items():
            made = [self.read(self.folder / "tokens" / name / f"{shard}.parquet") for shard in dataset.shards]
            rows, tokens = sum(m.rows.kept for m in made), sum(m.tokens["completion"] for m in made)
            lost = {"cross_dataset_duplicate": 2, "held_out_prompt": 1} if name == "chat" else {}
            for reason, n in lost.items():
                left_out[reason] += n
            mine = rows - sum(lost.values())
            shares = {"train": 0.88, "validation": 0.04, "test": 0.08}
            per_row = tokens / rows
            split = {k: round(mine * share) for k, share in shares.items() if k != "train"}
            split["train"] = mine - sum(split.values())
            datasets[name] = {
                "rows": mine, "conversations": mine, "left_out": lost, "coverage": 0.95,
                "splits": {
                    k: {"rows": n, "tokens": round(n * (per_row + 74)), "completion_tokens": round(n * per_row)}
                    for k, n in split.items()
                },
                "share": 1 / len(self.config.datasets), "over_share": False,
            }  # fmt: skip
            read, kept = read + rows, kept + mine
        splits = {
            name: {
                key: sum(d["splits"][name][key] for d in datasets.values())
                for key in ("rows", "tokens", "completion_tokens")
            }
            for name in ("train", "validation", "test")
        }
        summary = {
            "rows": {"read": read, "kept": kept}, "splits": splits, "left_out": left_out, "datasets": datasets,
            "lengths": {
                "step": 128, "histogram": {"0": 211, "128": 402, "256": 268, "384": 61, "512": 12}, "longest": 633,
            },
            "packing": {
                "tokens_per_row": {"5": 61, "25": 118, "50": 204, "75": 297, "95": 410, "99": 522},
                "completion_tokens_per_row": {"5": 22, "25": 71, "50": 133, "75": 188, "95": 192, "99": 192},
                "batches": {
                    str(1024 << k): {
                        "rows_per_batch": 4.1 * 2**k, "padding_share": 0.0812 + 0.01 * k, "filled_share": 0.7741,
                    }
                    for k in range(5)
                },
            },
            "warnings": [],
            "draft_vocabulary": {
                "size": 8192, "kept_from": None, "missing_specials": [], "supervised_ids_in_train": 9134,
                "coverage": {"all": 0.967, "train": 0.971, "held_out": 0.9134, "held_out_by_dataset": {}},
            },
        }  # fmt: skip
        tally = RowCounts(read=read, kept=kept, dropped={k: n for k, n in left_out.items() if n})
        with publish(self.folder / "merged" / "summary.json", stage="merge", recipe={}) as draft:
            draft.path.write_text(json.dumps(summary))
            draft.rows = tally
        for name in ("index.parquet", "vocab.safetensors"):
            self.manifest(self.folder / "merged" / name, "merge", tally, 90_000, None)
        times = self.folder / "benchmarks" / "merge.tsv"
        times.parent.mkdir(parents=True, exist_ok=True)
        times.write_text("s\tcpu_time\n3.1\t2.75\n")

    def train(self, name: str, steps: int = 420) -> None:
        k = self.config.drafters[name].ttt_steps
        records = []
        for step in range(1, steps + 1):
            seen = step * 760
            wave = 0.18 * math.sin(step * 1.7) * math.exp(-step / 900)
            loss = 4.6 * math.exp(-step / 150) + 4.1 + wave
            records.append(
                self.point(
                    step, "train", seen, loss, [0.52 - 0.05 * i - 0.3 * math.exp(-step / 120) for i in range(k)], None
                )
            )
            if step % 60 == 0:
                accuracy = [0.46 - 0.07 * i - 0.3 * math.exp(-step / 130) for i in range(k)]
                chain = [math.prod(accuracy[: i + 1]) for i in range(k)]
                records.append(self.point(step, "validation", seen, loss + 0.22, accuracy, 1 + sum(chain) * 1.3))
        folder = self.folder / "drafters" / name
        folder.mkdir(parents=True)
        pl.DataFrame(records).write_parquet(folder / "metrics.parquet")
        rows = RowCounts(read=900, kept=900)
        self.manifest(
            folder / "model.safetensors", "train", rows, 21_000_000, 812.0,
            tokens={"seen": steps * 760, "train": steps * 760 // 3},
            facts={"steps": steps, "parameters": 10_480_000, "simulated_acceptance_length": 1.86},
        )  # fmt: skip
        self.manifest(self.folder / "export" / name / "sglang" / "model.safetensors", "export", rows, 21_000_000, 2.0)

    @staticmethod
    def point(
        step: int, split: str, seen: int, loss: float, accuracy: list[float], length: float | None
    ) -> dict[str, Any]:
        return {
            "step": step, "split": split, "tokens_seen": seen, "loss": loss,
            **{f"accuracy_{i}": value for i, value in enumerate(accuracy)},
            "simulated_acceptance_length": length, "learning_rate": 1e-3 if split == "train" else None,
        }  # fmt: skip

    def bench(self, drafter: str, suite: str, **over: Any) -> None:
        write_json(self.folder / "bench" / drafter / f"{suite}.json", {**bench_figures(), "suite": suite, **over})
        times = self.folder / "benchmarks" / "bench" / drafter / f"{suite}.tsv"
        times.parent.mkdir(parents=True, exist_ok=True)
        times.write_text("s\th:m:s\tcpu_time\n121.4\t0:02:01\t118.25\n")

    @staticmethod
    def read(data: Path) -> Manifest:
        return Manifest.model_validate_json(manifest_path(data).read_text())


def spread(median: float, part: float) -> dict[str, float]:
    return {"median": median, "low": round(median * (1 - part), 3), "high": round(median * (1 + part), 3)}


def bench_figures() -> dict[str, Any]:
    """What ``eyrie.bench`` writes for a drafter that is worth deploying."""
    datasets = [
        {
            "name": name, "prompts": 8, "tokens": 970 + 9 * place, "acceptance_length": drafter,
            "ngram_acceptance_length": ngram, "speedup": round(drafter / 1.36, 3),
            "per_position": [round((drafter - 1) * f, 4) for f in (0.56, 0.29, 0.15)],
        }
        for place, (name, (drafter, ngram)) in enumerate(LENGTHS.items())
    ]  # fmt: skip
    return {
        "acceptance_length": 1.8634, "ngram_acceptance_length": 1.4712, "speedup": spread(1.372, 0.021),
        "ngram_speedup": spread(1.214, 0.03), "lossless_float32": True, "differing_prompts": [],
        "per_position": [0.4835, 0.2504, 0.1295], "conditional": [0.4835, 0.5179, 0.5172], "break_even": 1.358,
        "step_cost_ratio": spread(1.358, 0.02),
        "verdict": {
            "deploy": True,
            "sentence": "Deploy: acceptance length 1.86 against a break-even of 1.36, 1.37 times plain decoding "
            "(1.34 to 1.40).",
        },
        "plain_tokens_per_s": spread(61.4, 0.02), "speculative_tokens_per_s": spread(84.2, 0.025),
        "ngram_tokens_per_s": spread(74.6, 0.03), "draft_tokens": 3, "max_tokens": 128, "prompts": 32, "tokens": 3934,
        "repeats": 3, "timed_prompts": 12, "datasets": datasets,
        "per_request": [{"dataset": "code", "id": "a:1", "tokens": 128, "verifies": 60, "acceptance_length": 2.1167}],
        "near_ties": {"tokens": 412, "differing": 5, "largest_gap": 0.0613, "dtype": "bfloat16"},
        "machine": {
            "cpu": "Intel(R) Xeon(R) Processor @ 2.60GHz", "cores": 2, "threads": 1, "dtype": "float32",
            "torch": "2.13.0", "instructions": "AVX2",
        },
        "sample_trace": {
            "dataset": "code", "prompt": "Complete the following Python function.\n\ndef add(a, b):",
            "steps": [
                {"accepted": ["def", " add"], "bonus": "(", "refused": " sum"},
                {"accepted": ["a", ",", " b"], "bonus": "):", "refused": None},
                {"accepted": ["\n   "], "bonus": " return", "refused": " result"},
                {"accepted": [" a", " +", " b"], "bonus": "\n", "refused": None},
            ],
        },
    }  # fmt: skip
