"""Full parameters out of the ranks and into them, in bounded memory: streams and files."""
