"""Pages, markdown and cards that show what a run has found."""
