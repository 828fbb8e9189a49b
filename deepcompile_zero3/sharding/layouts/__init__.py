"""Where the rows of a parameter are: layouts, meshes, and replicas of the same rows."""
