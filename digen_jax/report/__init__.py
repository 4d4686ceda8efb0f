"""One HTML file about a run, made from its workdir alone: curves, pictures, tables and the timeline."""
