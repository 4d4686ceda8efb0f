"""Flow matching: sigma schedules, reverse steps, sampling and replay; all pure functions.

Sigma is 1 for noise and 0 for data: x_sigma = (1 - sigma) x0 + sigma eps, the network predicts
v = eps - x0, and a reverse step goes from sigma to sigma_next < sigma.
"""
