"""`csakit bench`: named shapes, one way to measure, one tidy table.

shapes.py       operations, shapes and suites; what counts as useful work
selections.py   which entries the queries attend: uniform, or clustered as a trained indexer picks them
problem.py      the tensors of one case
providers/      who is measured: csakit's backends, an eager author, stock Transformers, Megatron-LM, your own
agreement.py    is it right? against the reference in float64, before anything is timed
measurement.py  interleaved repeats, clocks, the matrix-product peak
memory.py       peak memory, in a fresh process
figures.py      medians, quantiles, ratios, what moved beyond the noise
records.py      one row per figure, as CSV and JSON
runner.py       a suite from beginning to end
table.py        the table for people; picture.py the picture
"""
