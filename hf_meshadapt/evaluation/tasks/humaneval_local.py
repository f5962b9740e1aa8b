"""Scores one HumanEval answer; lm-eval loads it from beside the task file."""

from hf_meshadapt.evaluation.sandbox import passes


def pass_at_1(doc: dict, results: list[str]) -> dict[str, float]:
    """1.0 where the only sample of the problem passes its test."""
    program = f"{doc['prompt']}{results[0]}\n{doc['test']}\ncheck({doc['entry_point']})\n"
    return {"pass@1": float(passes(program))}
