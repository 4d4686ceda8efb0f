"""Words of the shapes task and their colors."""

# Shapes that blur and noise do not confuse at nine pixels across, unlike a square and a circle.
SHAPES = ("circle", "triangle", "cross", "star", "ring", "heart")

# RGB in [0, 1]: as different as possible from one another and from every background.
COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.88, 0.08, 0.10),
    "orange": (1.00, 0.52, 0.00),
    "yellow": (1.00, 0.92, 0.10),
    "green": (0.05, 0.65, 0.20),
    "blue": (0.10, 0.25, 0.95),
    "purple": (0.62, 0.10, 0.80),
    "white": (1.00, 1.00, 1.00),
    "black": (0.00, 0.00, 0.00),
}

# Unsaturated midtones, so that no object's color is close to the background.
BACKGROUNDS: dict[str, tuple[float, float, float]] = {
    "dark": (0.31, 0.31, 0.33),
    "gray": (0.52, 0.52, 0.52),
    "light": (0.70, 0.70, 0.71),
    "beige": (0.72, 0.64, 0.52),
    "slate": (0.40, 0.48, 0.58),
    "rose": (0.68, 0.50, 0.54),
}

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
RELATIONS = ("left of", "right of", "above", "below")
MIRRORED = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
# Directions on the image (y points down), and the tasks of clips, in which all objects have a color and a motion.
MOTIONS = {
    "moving left": (-1, 0),
    "moving right": (1, 0),
    "moving up": (0, -1),
    "moving down": (0, 1),
    "standing still": (0, 0),
}
MOTION_TASKS = ("motion", "motion_counting", "motion_attr")
NUMBERS = {2: "two", 3: "three", 4: "four"}
PLURALS = {shape: shape + ("es" if shape.endswith("s") else "s") for shape in SHAPES}
