"""The features that are plugged into the core: a line each, which goes with the feature's folder.

The core calls what it finds here, and imports no feature. Features that a call of the user's
installs, such as ``step_in_backward``, need no line.
"""
