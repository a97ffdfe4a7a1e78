"""From a pretrained model to a converted one: sweep, order, stages, the loop over steps, its control, the planner."""
