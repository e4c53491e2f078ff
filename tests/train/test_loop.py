"""The training loop: exact resume, a falling loss, divergence in one line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from eyrie.config import Drafter
from eyrie.drafters.eagle3 import Eagle3, Eagle3Config, start_at_random
from eyrie.errors import EyrieError
from eyrie.train.data import Row
from eyrie.train.loop import Trainer, simulated_acceptance_length
from eyrie.train.loss import StepSums, Teacher

H, V, DV = 16, 40, 32
OPTIONS = Drafter(
    ttt_steps=2, epochs=2.5, batch_tokens=40, learning_rate=1e-2, muon_learning_rate=3e-2, evaluate_every=5,
    checkpoint_every=3,
)  # fmt: skip


def successor(token: int) -> int:
    """The toy language: each token decides the next, all within the draft vocabulary."""
    return (7 * token + 3) % DV


def toy_row(seed: int, length: int = 12) -> Row:
    """A row of the toy language; aux states name the token, the final states its successor."""
    table = torch.randn(V, H, generator=torch.Generator().manual_seed(99))
    ids = [seed % DV]
    while len(ids) < length:
        ids.append(successor(ids[-1]))
    tokens = torch.tensor(ids)
    start = 2 + seed % 3
    return Row(
        ids_T=tokens,
        spans=((start, length),),
        aux_TA=table[tokens].repeat(1, 3),
        final_FH=3 * table[tokens[start:]],  # the state before each label points at the label
        weight=1.0,
        answered=True,
    )


def trainer(
    options: Drafter = OPTIONS, checkpoints: Path | None = None, identity: str = "one", rows: int = 24,
    compute: torch.dtype = torch.float32,
) -> Trainer:  # fmt: skip
    torch.set_num_threads(1)
    table = torch.randn(V, H, generator=torch.Generator().manual_seed(99))
    config = Eagle3Config(
        hidden_size=H, intermediate_size=24, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
        rms_norm_eps=1e-5, rope_theta=10_000.0, max_position_embeddings=64, vocab_size=V, draft_vocab_size=DV,
        layers=(2, 3, 4), ttt_steps=options.ttt_steps, target_sha="x",
    )  # fmt: skip
    drafter = Eagle3(config).compute_in(compute)
    start_at_random(drafter, torch.Generator().manual_seed(options.seed))
    drafter.t2d[:DV] = True
    ids = drafter.target_ids()
    return Trainer(
        drafter, table, Teacher(table[ids].to(compute), ids, V), [toy_row(i) for i in range(rows)],
        [toy_row(i) for i in range(50, 56)], options, checkpoints, identity,
    )  # fmt: skip


class Killed(Exception):
    pass


def kill_before_step(trainer: Trainer, step: int) -> None:
    """Make the trainer die where a SIGKILL could: between two steps."""
    original = trainer._step

    def dying(number: int, batch: list[int]) -> float:
        if number == step:
            raise Killed
        return original(number, batch)

    trainer._step = dying  # type: ignore[method-assign]


def counted_steps(trainer: Trainer) -> list[int]:
    steps: list[int] = []
    original = trainer._step

    def counting(number: int, batch: list[int]) -> float:
        steps.append(number)
        return original(number, batch)

    trainer._step = counting  # type: ignore[method-assign]
    return steps


def assert_same(one: Trainer, two: Trainer) -> None:
    assert one.state.metrics == two.state.metrics
    for (name, a), b in zip(one.drafter.state_dict().items(), two.drafter.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.fixture(scope="module")
def undisturbed() -> Trainer:
    done = trainer()
    done.run()
    return done


@pytest.mark.parametrize("deaths", [[1], [3], [7], [4, 5, 11]])
def test_a_killed_training_resumes_exactly(undisturbed: Trainer, tmp_path: Path, deaths: list[int]) -> None:
    for step in deaths:
        dying = trainer(checkpoints=tmp_path)
        kill_before_step(dying, step)
        with pytest.raises(Killed):
            dying.run()
    resumed = trainer(checkpoints=tmp_path)
    steps = counted_steps(resumed)
    resumed.run()
    assert steps == list(range(deaths[-1] // 3 * 3, resumed.total_steps))
    assert_same(resumed, undisturbed)


def test_a_killed_training_in_bfloat16_resumes_exactly(tmp_path: Path) -> None:
    whole = trainer(compute=torch.bfloat16)
    whole.run()
    dying = trainer(checkpoints=tmp_path, compute=torch.bfloat16)
    kill_before_step(dying, 7)
    with pytest.raises(Killed):
        dying.run()
    resumed = trainer(checkpoints=tmp_path, compute=torch.bfloat16)
    resumed.run()
    assert_same(resumed, whole)
    assert {p.dtype for p in resumed.drafter.parameters()} == {torch.float32}


def test_a_checkpoint_is_one_pair_of_files(tmp_path: Path) -> None:
    dying = trainer(checkpoints=tmp_path)
    kill_before_step(dying, 10)
    with pytest.raises(Killed):
        dying.run()
    assert {file.name for file in tmp_path.iterdir()} == {"latest.json", "step-00000009.safetensors"}


def test_a_checkpoint_of_another_identity_is_ignored(undisturbed: Trainer, tmp_path: Path) -> None:
    dying = trainer(OPTIONS.model_copy(update={"seed": 1}), checkpoints=tmp_path, identity="another")
    kill_before_step(dying, 7)
    with pytest.raises(Killed):
        dying.run()
    fresh = trainer(checkpoints=tmp_path)
    steps = counted_steps(fresh)
    fresh.run()
    assert steps[0] == 0
    assert_same(fresh, undisturbed)


def test_a_checkpoint_without_its_tensors_is_ignored(undisturbed: Trainer, tmp_path: Path) -> None:
    (tmp_path / "latest.json").write_text(json.dumps({"identity": "one", "file": "step-00000003.safetensors"}))
    fresh = trainer(checkpoints=tmp_path)
    fresh.run()
    assert_same(fresh, undisturbed)


def rows_of(metrics: Sequence[dict[str, Any]], split: str) -> list[dict[str, Any]]:
    return [row for row in metrics if row["split"] == split]


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_the_toy_language_is_learnt(compute: torch.dtype) -> None:
    options = OPTIONS.model_copy(update={"epochs": 14.0, "evaluate_every": 20})
    learner = trainer(options, rows=32, compute=compute)
    metrics = learner.run()
    validation = rows_of(metrics, "validation")
    assert validation[-1]["loss"] < 0.5 * validation[0]["loss"]
    assert validation[-1]["accuracy_0"] > 0.9
    assert validation[-1]["simulated_acceptance_length"] > 2.5
    assert len(rows_of(metrics, "train")) == learner.total_steps


def test_metrics_say_what_happened(undisturbed: Trainer) -> None:
    train, validation = (rows_of(undisturbed.state.metrics, split) for split in ("train", "validation"))
    total = undisturbed.total_steps
    assert [row["step"] for row in train] == list(range(1, total + 1))
    assert [row["step"] for row in validation] == [*range(5, total, 5), total]
    assert all(row["simulated_acceptance_length"] is None for row in train)
    assert all(row["learning_rate"] is None for row in validation)
    assert train[0]["learning_rate"] == pytest.approx(OPTIONS.learning_rate * undisturbed.optimizer.rate(0))
    per_epoch = sum(row.labels for row in undisturbed.train_rows)
    at_epoch = total * 2 // 5
    assert train[at_epoch - 1]["tokens_seen"] == per_epoch
    assert train[2 * at_epoch - 1]["tokens_seen"] == 2 * per_epoch


def test_the_best_weights_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter that comes back is the one of the best validation, not the last one."""
    lengths = iter([1.5, 3.0, *[2.0] * 50])
    monkeypatch.setattr("eyrie.train.loop.simulated_acceptance_length", lambda sums: current[0])
    current = [0.0]
    learner = trainer()
    seen: list[dict[str, torch.Tensor]] = []
    original = learner._validate

    def watching() -> None:
        current[0] = next(lengths)
        seen.append(learner._weights())
        original()

    learner._validate = watching  # type: ignore[method-assign]
    learner.run()
    assert learner.state.best == 3.0
    assert len(seen) > 2
    for name, parameter in learner.drafter.named_parameters():
        assert torch.equal(parameter, seen[1][name]), name
    assert not torch.equal(learner.drafter.fc.weight, seen[-1]["fc.weight"])


def test_divergence_is_one_line_that_says_what_to_do() -> None:
    sick = trainer()
    sick.train_rows[3].final_FH.fill_(float("nan"))
    with pytest.raises(EyrieError, match=r"step \d+: .*diverged; lower .*learning_rate") as caught:
        sick.run()
    assert "\n" not in str(caught.value)


def test_simulated_acceptance_length() -> None:
    sums = [StepSums(run=8, labels=10), StepSums(run=3, labels=9), StepSums(run=0, labels=0)]
    assert simulated_acceptance_length(sums) == pytest.approx(1 + 0.8 + 1 / 3)
    assert simulated_acceptance_length([]) == 1.0
