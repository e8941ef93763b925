"""`csakit bench`: named shapes, one way to measure, one tidy table.

shapes.py       operations and shapes; what counts as useful work
suites.py       which cases are measured together, and against whom
selections.py   which entries the queries attend: uniform, or clustered as a trained indexer picks them
problem.py      the tensors of one case; layers.py the modules, steps.py the training steps around them
providers/      who is measured: csakit's backends and modules, an eager author, stock Transformers, Megatron-LM, your own
agreement.py    is it right? against the reference in float64, before anything is timed
measurement.py  interleaved repeats, clocks, the matrix-product peak
worker.py       a process of its own: peak memory, whole layers and steps
profile.py      where the time of a call goes; starts.py what a fresh process waits for
figures.py      medians, quantiles, ratios, what moved beyond the noise
records.py      one row per figure, as CSV and JSON; the file grows contest by contest
contest.py      one contest from beginning to end; runner.py a suite of them
table.py        the table for people; picture.py the picture; goals.py what the CPU backend is held to
"""
