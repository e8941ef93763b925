"""What the teacher of a Lightning Indexer is worth: a controlled study on a small language model.

    python -m benchmarks.teacher_study run --preset reduced --out runs/teacher_study
    python -m benchmarks.teacher_study report --out runs/teacher_study

PROTOCOL.md fixes what is measured; docs/teacher_study.md holds the result.
"""
