"""What every other package stands on: devices, files read and written safely, the hub's folders, encryption. No torch
until a device is asked for."""
