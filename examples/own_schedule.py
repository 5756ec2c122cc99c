"""A schedule of your own: registered, proven to end, printed and simulated, without any process.

    python examples/own_schedule.py

Eager 1F1B (Zhuang et al. 2023, "On Optimizing the Communication of Model Parallelism") runs two forwards ahead for each
later stage where 1F1B runs one. It holds more microbatches, and hides the time that rows take between ranks.

A training script that imports this file runs it by
``HeteroStrategy(layouts, schedule="eager_1f1b")``, a recipe by ``imports=[own_schedule] strategy.schedule=eager_1f1b``.
"""

from hetero_strategy import ModuleLayout
from hetero_strategy.layout.spec import place
from hetero_strategy.schedule.action import Action, Span, StageId, StepWork
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.check import check
from hetero_strategy.schedule.graph import stage_graph
from hetero_strategy.schedule.policies import ModuleSteps, SchedulePolicy, register_schedule
from hetero_strategy.schedule.programs import RankProgram, one_forward_one_backward
from hetero_strategy.simulator.cluster import Links
from hetero_strategy.simulator.simulate import simulate

MICROBATCHES = 8


def eager_1f1b(steps: ModuleSteps) -> tuple[RankProgram, ...]:
    """Return a list of (kind, stage, place of the microbatch) for each pipeline rank of one module."""
    last = steps.pipeline.pp - 1
    # ``leads[j]`` forwards come before backward j: as many as modules after this one need, and two for each later
    # stage, within ``max_in_flight`` and the step.
    needs = list(zip(steps.should, steps.limit, strict=True))
    leads = [
        [min(should + 2 * (last - stage), limit, steps.count) for should, limit in needs] for stage in range(last + 1)
    ]
    return tuple(one_forward_one_backward(stage, leads[stage]) for stage in range(last + 1))


register_schedule(SchedulePolicy("eager_1f1b", eager_1f1b))


def main() -> None:
    # An encoder on rank 0 feeds a language model in three pipeline stages on ranks 1 to 3.
    layouts = place({"vision": ModuleLayout([0]), "llm": ModuleLayout([1, 2, 3], pp=3)}, 4).layouts
    trains = {StageId("vision", 0): True} | {StageId("llm", stage): True for stage in range(3)}
    graph = stage_graph(list(layouts), [("vision", "llm")], layouts, trains)
    spans = tuple(Span(number=i, first=i, last=i) for i in range(MICROBATCHES))
    work = StepWork({"vision": spans, "llm": spans}, {("vision", "llm"): tuple((i, i) for i in range(MICROBATCHES))})

    def seconds(action: Action) -> float:
        return {"F": 1.0, "B": 2.0}.get(action.kind, 0.0)  # UNSHARD and REDUCE take no time

    for name in ("1f1b", "eager_1f1b"):
        schedule = make_schedule(name, graph, work)
        check(schedule)  # raises ScheduleError if a rank could wait for ever
        held = ", ".join(f"{node} {count}" for node, count in schedule.in_flight.items())
        print(f"{name}: microbatches held at most: {held}")
        for latency in (0.0, 0.5):
            simulation = simulate(schedule, seconds, Links(latency=latency))
            print(f"  latency {latency}: {simulation.time:.1f} s, ranks idle {simulation.bubble:.0%}")
    print(schedule.grid())


if __name__ == "__main__":
    main()
