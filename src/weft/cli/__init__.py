"""The command line: one module per subcommand, errors caught once in main."""
