"""The face-recognition recipe: drawn or photographed faces, a ViT, a head larger than it, verification.

cards           ten models of a report, planned at their size
drawn           faces that are drawn, without a download
face_config     the settings of the face-recognition recipe
images          images by identity, drawn or read; and how they are changed for training
needs           what a setting takes of a device, for any batch, by the planner: nothing is trained for it
remarks         what the report remarks, and what is so here
row             one line of the study
study           five ways to split a face model's states
train           trains a face model
verification    how well scores of pairs tell whether two images are of one identity
vit             the face model
_drawing        pictures for a page as text
_face_pictures  pictures of a face run: curves of errors, and what the images look like
_findings       what the rows of the study say of the report's order: sentences
_matcher        a learned matcher of two embeddings
_stores         where images by identity lie: a folder for each identity, webdataset's shards, parquet
_study_page     the study as text and as a page
_transforms     changes of images by torchvision
"""
