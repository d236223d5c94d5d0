"""Colors of plots and web pages."""

# Okabe and Ito's palette for color-blind readers, darker where its contrast is low; lines differ in style and markers as
# well, for print in black.
COLORS = {
    "blue": ("#0072b2", "#56b4e9"),
    "orange": ("#d55e00", "#f5995c"),
    "green": ("#009e73", "#2fc79b"),
    "purple": ("#b0588b", "#e09cc4"),
    "grey": ("#666666", "#a6a6a6"),
    "ink": ("#1a1a1a", "#e8e8e8"),
    "grid": ("#dddddd", "#3d3d3d"),
    "paper": ("#ffffff", "#171717"),
}
"""``(light, dark)`` colors by name; plots use the light ones."""
