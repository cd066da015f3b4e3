"""The arguments of each subcommand, and its help. These modules import nothing slow."""
