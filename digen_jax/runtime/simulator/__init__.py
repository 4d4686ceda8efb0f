"""The scheduler on a virtual clock: `simulate.simulate(layout, costs, settings, steps) -> Report`."""
