"""The `treewy` command: one file per subcommand."""
