"""One HTML page of a run or several, which opens from disk without a network.

`page.write_page` makes it of `recorded_run.RecordedRun`, what a run directory holds,
and `measurement.Measurement`, what was measured of its model for the page.
"""
