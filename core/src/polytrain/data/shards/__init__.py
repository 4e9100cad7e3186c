"""A rank's part of a data set whose rows are known: in memory, or read ahead."""
