"""Reads a picture of `lockstep plot` as a reader sees it, and prints it as JSON: python3 read_curves.py FILE.

A position on an axis is that of the grid line that is next to the label."""

import json
import re
import sys
import xml.etree.ElementTree as xml

SVG = "{http://www.w3.org/2000/svg}"
UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, " s": 1, " min": 60, " h": 3600, " d": 86400, "": 1}


def value_of(label):
    number, unit = re.fullmatch(r"(-?[0-9.]+(?:e-?[0-9]+)?)(.*)", label).groups()
    return float(number) * UNITS[unit]


def text_of(parent, kind):
    return [text.text or "" for text in parent.iter(SVG + "text") if text.get("class") == kind]


def ticks_of(panel, axis):
    lines = [line for line in panel.findall(SVG + "line") if line.get(axis + "1") == line.get(axis + "2")]
    grid = [float(line.get(axis + "1")) for line in lines]
    ticks = []
    for label in panel.findall(SVG + "text"):
        if label.get("class") == axis:
            place = min(grid, key=lambda at: abs(at - float(label.get(axis))))
            ticks.append({"label": label.text, "value": value_of(label.text), "at": place})
    return ticks


def curves_of(panel, kind):
    curves = []
    for group in panel.findall(SVG + "g"):
        if group.get("class") != kind:
            continue
        lines = group.findall(SVG + "polyline")
        circles = group.findall(SVG + "circle")
        curves.append({
            "run": group.find(SVG + "title").text,
            "colour": group.get("stroke"),
            "dashes": lines[0].get("stroke-dasharray", "") if lines else "",
            "lines": [[[float(n) for n in point.split(",")] for point in line.get("points").split()] for line in lines],
            "dots": [[float(circle.get("cx")), float(circle.get("cy"))] for circle in circles],
        })
    return curves


def panel_of(panel):
    return {
        "metric": text_of(panel, "metric")[0],
        "note": "".join(text_of(panel, "note")),
        "empty": "".join(text_of(panel, "empty")),
        "x": ticks_of(panel, "x"),
        "y": ticks_of(panel, "y"),
        **{kind: curves_of(panel, kind) for kind in ("raw", "steps", "epochs")},
    }


def entries_of(root, kind):
    return [{
        "text": entry.find(SVG + "text").text,
        "full": entry.find(SVG + "title").text,
        "colour": entry.find(SVG + "line").get("stroke"),
        "dashes": entry.find(SVG + "line").get("stroke-dasharray", ""),
    } for legend in root.findall(SVG + "g") if legend.get("class") == kind for entry in legend]


root = xml.parse(sys.argv[1]).getroot()
_, _, width, height = map(float, root.get("viewBox").split())
print(json.dumps({
    "width": width,
    "height": height,
    "scales": root.get("width") == "100%" and root.get("height") is None,
    "title": "".join(text_of(root, "title")),
    "style": root.find(SVG + "style").text,
    "legend": entries_of(root, "legend"),
    "key": entries_of(root, "key"),
    "panels": [panel_of(group) for group in root.findall(SVG + "g") if group.get("class") == "panel"],
}))
