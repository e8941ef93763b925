"""`csakit report`: what a run learnt, as numbers and as one HTML page."""
