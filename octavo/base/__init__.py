"""The lowest package: devices, safe reading and writing of files, folders of the Hugging Face hub, encryption. It
imports torch only when a device is used."""
