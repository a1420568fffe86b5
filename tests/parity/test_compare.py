"""The comparison fails where it should."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from parity import record
from parity.__main__ import main
from parity.compare import FEWEST, compare
from parity.record import Record

from fa4_core.testing.scenarios import SHARED_PAGE, scenarios


def made(engine: str, page_size: int, threads: int = 1, seed: int = 0) -> Record:
    """A record as a healthy session leaves it: everyone's answers are the same, their pages are not."""
    names = [f"scenario {i}" for i in range(FEWEST)]
    random, pages = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    dtypes = (torch.float32, torch.bfloat16)
    outs = {n: torch.randn(5, 2, 4, generator=random).to(dtypes[i % 2]) for i, n in enumerate(names)}
    tables = {n: {r: torch.randperm(9, generator=pages)[:, None] * page_size for r in "ab"} for n in names}
    slots = {n: {r: (t + torch.arange(page_size)).flatten() for r, t in of.items()} for n, of in tables.items()}
    environment = {"torch": "2.13.0", "threads": str(threads), "fa4_core": "now"}
    who = record.name(engine, "1.2", page_size, record.ON["cpu"][threads - 1])
    return Record(who, page_size, environment, dict.fromkeys(names, "abc"), outs, slots)


def problems(*records: Record) -> list[str]:
    pairs = compare(list(records), "now")
    assert pairs
    return [problem for pair in pairs for problem in pair.problems]


ONE, OTHER = made("vllm", 16, seed=1), made("sglang", 1, seed=2)
SOME = "scenario 7"


def test_who_is_held_against_whom():
    records = [made(e, p, t, seed=p + t) for e, p in (("vllm", 16), ("sglang", 1), ("sglang", 4)) for t in (1, 2)]
    pairs = compare(records, "now")
    assert not [pair for pair in pairs if pair.problems]
    assert len(pairs) == 2 * 2 + 3, "the engines at each number of threads; 1 thread with 2"


def changed(of: Record, field: str, value: object, scenario: str = SOME) -> Record:
    return replace(of, **{field: getattr(of, field) | {scenario: value}})


def out() -> torch.Tensor:
    """The last bit of one number turned over."""
    t = OTHER.outs[SOME].clone()
    t.view(torch.int16)[3, 0, 0] ^= 1
    return t


ZEROS = torch.zeros(5, 2, 4)
SORTED = {"a": torch.arange(100), "b": torch.arange(100, 170)}
FEW = {name: ONE.outs[name] for name in list(ONE.outs)[:-1]}


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (ONE, changed(OTHER, "outs", out()), "scenario 7: 1 of 5 rows differ in their bits, the first is row 3"),
        (changed(ONE, "outs", ZEROS), changed(OTHER, "outs", -ZEROS), "5 of 5 rows differ"),
        (ONE, changed(OTHER, "outs", OTHER.outs[SOME][:4]), r"\[5, 2, 4\] and .*\[4, 2, 4\]"),
        (ONE, changed(OTHER, "outs", OTHER.outs[SOME].double()), "float64"),
        (ONE, changed(OTHER, "inputs", "other"), "scenario 7: the inputs differ"),
        (ONE, changed(OTHER, "outs", torch.zeros(1), "one more"), "only one has one more"),
        (ONE, changed(OTHER, "environment", "2.14", "torch"), "torch was 2.13.0 and 2.14"),
        (ONE, changed(OTHER, "environment", "new", "processor"), "processor was None and new"),
        (ONE, changed(OTHER, "slots", ONE.slots[SOME]), "scenario 7: both page tables are the same"),
        (ONE, changed(OTHER, "slots", SORTED), "scenario 7: the page table of sglang-1.2, .* is in order"),
        (ONE, changed(OTHER, "slots", {k: 170 - t for k, t in SORTED.items()}), "is in order"),
        (ONE, changed(OTHER, "slots", {"a": torch.randperm(100)}), r"requests \['a', 'b'\] and \['a'\]"),
        (replace(ONE, outs=FEW), replace(OTHER, outs=FEW), f"{FEWEST - 1} scenarios in common, fewer than {FEWEST}"),
    ],
)  # fmt: skip
def test_what_stands_against_parity(one, other, message):
    assert not problems(ONE, OTHER)
    [found] = problems(one, other)
    assert re.search(message, found)


def test_records_of_another_state_of_the_core_prove_nothing():
    older = [changed(of, "environment", "then", "fa4_core") for of in (ONE, OTHER)]
    found = problems(*older)
    assert len(found) == 2
    assert all(re.search("was made by fa4_core then, which is now now", problem) for problem in found)


def test_a_number_of_threads_is_no_excuse():
    other = changed(made("vllm", 16, threads=2, seed=1), "outs", out())
    [found] = problems(ONE, other)
    assert "rows differ" in found


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Two engines' records, the last of them still to be changed."""
    monkeypatch.setattr(record, "core_digest", lambda: "now")
    for engine, sizes in record.PAGE_SIZES.items():
        for of in (made(engine, size, n, seed=size) for size in sizes for n in (1, 2)):
            record.write(of, tmp_path)
    return tmp_path


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    return int(end.value.code)


def test_a_record_outlives_its_file(tmp_path):
    back = record.read(record.write(ONE, tmp_path))
    assert (back.who, back.page_size, back.environment, back.inputs) == (ONE.who, 16, ONE.environment, ONE.inputs)
    assert all(torch.equal(back.outs[name], t) for name, t in ONE.outs.items())
    assert all(torch.equal(back.slots[name][r], t) for name, s in ONE.slots.items() for r, t in s.items())


def test_the_command_says_what_is_wrong(kept, capsys):
    assert run(kept, "vllm-1.2", "sglang-1.2") == 0
    assert "equal" in capsys.readouterr().out
    assert run(kept, "vllm-1.2", "sglang-1.2", "vllm-9") == 1
    assert "vllm-9, pages of 16, 2 threads: no record" in capsys.readouterr().out
    assert run(kept, "fast-1.2") == 2
    assert "was 'fast-1.2'; allowed: vllm or sglang" in capsys.readouterr().err
    (kept / (ONE.who + record.SUFFIX)).unlink()
    assert run(kept, "vllm-1.2") == 1
    assert "nothing was compared" in capsys.readouterr().out
    record.write(changed(ONE, "outs", out()), kept)
    assert run(kept, "vllm-1.2", "sglang-1.2", "--json") == 1
    assert "rows differ" in capsys.readouterr().out


def test_the_scenarios_themselves():
    names = [scenario.name for scenario in scenarios()]
    assert len(set(names)) == len(names) >= FEWEST
    digests = {scenario.digest() for scenario in scenarios()}
    assert len(digests) == len(names)
    for scenario in scenarios():
        rows = [row for step in scenario.steps for row in step]
        assert all(row.prefix % SHARED_PAGE == 0 for row in rows)
        assert sum(-(-n // SHARED_PAGE) for n in scenario.lengths.values()) >= 4
    assert any(s.spec.sinks for s in scenarios())
    assert any(s.spec.window[0] for s in scenarios())
