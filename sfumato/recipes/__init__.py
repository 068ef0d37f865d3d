"""One thin file a verb: a frozen `Config`, its `PRESETS`, and `run(config, run)`, a few stages.

Each module has the same parts, which is all that `cli` knows of it:

    Config      settings, with a line of help under each
    PRESETS     name -> function that returns a Config, with the score it reached
    run         does the work in a run directory and returns the summary
    show        the summary in words
    needs_run   whether a run directory is made for a config without being asked for
"""
