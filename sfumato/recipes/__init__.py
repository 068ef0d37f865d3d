"""One thin file a verb: a frozen `Config`, its `PRESETS`, and `run(config, run)`, a few stages.

Each module has the same parts, which is all that `cli` knows of it:

    Config      settings, with a line of help under each
    PRESETS     name -> function that returns a Config, with the score it reached
    run         does the work in a run directory and returns the summary
    show        the summary in words
    needs_run   whether a run directory is made for a config without being asked for

and where it has use for them:

    FIRST_WORDS  a first word, and the flags it stands for: sfumato release verify BUNDLE
    WORDS        the setting that is given without a flag: sfumato report RUN RUN
    writes_file  whether a config asks for files in a place of its own, by write_file, and no run
    asks_more    whether a finished run has something left to do for a config
    shares_run   whether several processes may work in one run directory
    AGAIN        a stage that a finished run may take again
    INSTEAD_OF_PRESET  a setting that leaves a preset no meaning
    OWN_PRESETS  a setting that wants presets of its own, what the others are for, and such a one
"""
