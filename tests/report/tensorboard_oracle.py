"""TensorBoard's own readers of event files, and Python's own writer of them.

  tensorboard_oracle.py read FOLDER           all records, by EventAccumulator
  tensorboard_oracle.py shown FOLDER LOADER   what the web page gets, by TensorBoard's loader "python" or "rust"
  tensorboard_oracle.py write FOLDER FILES    writes histograms of the float64 numbers in the files, at steps 0, 1, ...,
                                              by torch.utils.tensorboard.SummaryWriter

The results are printed as JSON. Numbers are hexadecimal strings, because JSON has neither NaN nor infinity. The exit status
is 77 where a part is not installed; the last line of stderr says which.
"""
import io
import json
import logging
import os
import sys
import time

logging.disable(logging.WARNING)  # TensorBoard logs what it drops


def cannot_run(why):
    print(why, file=sys.stderr)
    sys.exit(77)


def of_histogram(value):
    numbers = {name: getattr(value, name).hex() for name in ("min", "max", "num", "sum", "sum_squares")}
    return numbers | {"limits": [x.hex() for x in value.bucket_limit], "counts": [x.hex() for x in value.bucket]}


def of_image(event):
    from PIL import Image

    image = Image.open(io.BytesIO(event.encoded_image_string))
    image.load()
    return {"size": [event.width, event.height], "decoded_size": list(image.size), "mode": image.mode,
            "pixels": list(image.tobytes())}


def of_text(event):
    tensor = event.tensor_proto
    return {"text": tensor.string_val[0].decode(), "dimensions": len(tensor.tensor_shape.dim)}


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, STORE_EVERYTHING_SIZE_GUIDANCE

    events = EventAccumulator(folder, STORE_EVERYTHING_SIZE_GUIDANCE, purge_orphaned_data=True).Reload()
    tags = events.Tags()

    def records(kind, read, convert):
        return {tag: [{"step": e.step, "time": e.wall_time.hex(), **convert(e)} for e in read(tag)] for tag in tags[kind]}

    return {
        "scalars": records("scalars", events.Scalars, lambda e: {"value": e.value.hex()}),
        "histograms": records("histograms", events.Histograms, lambda e: of_histogram(e.histogram_value)),
        "images": records("images", events.Images, of_image),
        "texts": records("tensors", events.Tensors, of_text),
        "plugins": {tag: events.SummaryMetadata(tag).plugin_data.plugin_name for tag in tags["tensors"]},
    }


def provider_in_python(folder):
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer

    events = EventMultiplexer(purge_orphaned_data=True).AddRunsFromDirectory(folder)
    events.Reload()
    return MultiplexerDataProvider(events, folder)


def provider_in_rust(folder):
    from tensorboard.data import server_ingester
    from tensorboard.util import grpc_util

    try:
        binary = server_ingester.get_server_binary()
    except server_ingester.NoDataServerError as error:
        cannot_run(f"the package tensorboard_data_server has no program for this machine: {error}")
    ingester = server_ingester.SubprocessServerDataIngester(
        binary, folder, reload_interval=0, channel_creds_type=grpc_util.ChannelCredsType.LOCAL)
    ingester.start()
    return ingester.data_provider


def shown(folder, loader):
    from tensorboard import context
    from tensorboard.data.provider import RunTagFilter

    provider = provider_in_python(folder) if loader == "python" else provider_in_rust(folder)
    where = {"ctx": context.RequestContext(), "experiment_id": ""}
    deadline = time.monotonic() + 60
    while not provider.list_runs(**where):  # the server answers while it loads the folder
        assert time.monotonic() < deadline, f"{loader} finds no run in {folder}"
        time.sleep(0.01)

    def steps(plugin, list_tags, read):
        result = {}
        tags = list_tags(**where, plugin_name=plugin)
        for tag in next(iter(tags.values()), {}):
            found = read(**where, plugin_name=plugin, downsample=1000, run_tag_filter=RunTagFilter(tags=[tag]))
            result[tag] = [event.step for event in next(iter(found.values()), {}).get(tag, [])]
        return result

    return {
        "scalars": steps("scalars", provider.list_scalars, provider.read_scalars),
        "histograms": steps("histograms", provider.list_tensors, provider.read_tensors),
        "images": steps("images", provider.list_blob_sequences, provider.read_blob_sequences),
        "texts": steps("text", provider.list_tensors, provider.read_tensors),
    }


def write(folder, *files):
    sys.path.append(os.environ["LOCKSTEP_TEST_PACKAGES"])  # after torch's own: where tensorboard is installed
    try:
        import numpy
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        cannot_run(f"torch.utils.tensorboard: {error}")
    with SummaryWriter(folder) as writer:
        for step, file in enumerate(files):
            writer.add_histogram("values", numpy.fromfile(file), step)
    return {}


commands = {"read": read, "shown": shown, "write": write}
print(json.dumps(commands[sys.argv[1]](*sys.argv[2:])))
