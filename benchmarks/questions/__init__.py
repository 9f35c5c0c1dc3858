"""The questions, in the order of the report."""

from __future__ import annotations

from benchmarks.questions import clients, growth, interval, models, persist, ranks, restore, shapes, stall, training
from benchmarks.questions.base import Question

QUESTIONS: dict[str, Question] = {
    module.QUESTION.name: module.QUESTION
    for module in (stall, interval, models, training, persist, restore, shapes, ranks, growth, clients)
}
