"""Places where a job can run, one module each; all have `render(job)` and `launch(job)`."""
