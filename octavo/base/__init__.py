"""The lowest package: devices, safe file access, the Hugging Face hub, encryption. Imports torch only for devices."""
