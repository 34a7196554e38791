"""An HTML page about one or more runs, a single file that needs no network.

`page.render_page` makes it from `recorded_run.RecordedRun`, the content of a run
directory, and `measurement.Measurement`, what was measured with its model.
"""
