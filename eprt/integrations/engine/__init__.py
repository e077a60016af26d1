"""The part that the plugins of all engines share: how a layer is bound, planned, built, warmed up and reported.

An engine's own folder beside this one holds its hooks, its flags and the names of its parameters.
"""
