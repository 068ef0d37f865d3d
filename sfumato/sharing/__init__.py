"""Images that can be shared: feature statistics, matching, the bundle and its check."""
